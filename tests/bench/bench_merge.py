"""The merge of a 4.4 GB model and its proof, compared with a plain copy, the bare arithmetic, and peft's own way.

Run alone: python tests/bench/bench_merge.py [CORES]; it takes 14 GB in the working directory.

Every way that reads files runs in its own process, in turn, and starts with the model's files removed from the
page cache (cold) or freshly read (warm); each ends with its output synced to the disk. The proof, digests included,
reads what was merged just before and writes nothing, so the copy it is compared with is not synced. Rates of shared
disks change from minute to minute, so the rounds take turns and the best of each way counts. Seconds are those of the
work; the start of the process with its imports, which does not grow with the model, is given separately.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from anonymous_memory import peak_anonymous
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, RANK = 2560, 9728, 18, 151_936, 16
LINEAR_SHAPES = {
    "self_attn.q_proj": (4096, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 4096),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""Qwen3-4B's own shapes, in half of its layers."""

LAYERS_PER_SHARD = 5
ROUNDS = 3

OUR_WAY = """
from pathlib import Path
from vlmflow.merging.merge import merge_weights
begun = time.perf_counter()
merge_weights(Path(base), Path(adapter), Path(merged), sorted(os.listdir(base)), int(cores))
"""
BEFORE = """
import os, sys, time
base, adapter, merged, cores = sys.argv[1:]
"""
AFTER = """
print(time.perf_counter() - begun)
"""
PEFT_WAY = """
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
begun = time.perf_counter()
torch.set_num_threads(int(cores))
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
model.merge_and_unload().save_pretrained(merged, max_shard_size="1GB")
for name in os.listdir(merged):
    os.fsync(os.open(os.path.join(merged, name), os.O_RDONLY))
"""
PROOF = """
from pathlib import Path
from vlmflow.merging.proof import verified_files
from vlmflow.merging.verify_tensors import verify_tensors
begun = time.perf_counter()
verified_files(Path(merged), "bench")
verify_tensors(Path(base), Path(adapter), Path(merged), sorted(os.listdir(base)), int(cores))
"""
COPY_UNSYNCED = """
import subprocess
begun = time.perf_counter()
subprocess.run(["cp", "-r", "--reflink=never", base, merged], check=True)
"""
COPY = (
    COPY_UNSYNCED
    + """
for name in os.listdir(merged):
    os.fsync(os.open(os.path.join(merged, name), os.O_RDONLY))
"""
)


def bench_merge(folder: Path, cores: int) -> dict[str, Any]:
    """Measure everything once per round.

    folder: for about 14 GB, which are removed again.
    cores: how many the merge and the arithmetic may use.

    Returns seconds, bytes and ratios by name.
    """
    base, adapter, merged = folder / "base", folder / "adapter", folder / "merged"
    try:
        largest_shard = _write_model(base)
        _write_adapter(adapter)
        arguments = [str(base), str(adapter), str(merged), str(cores)]
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(ROUNDS):
            for cache in ("cold", "warm"):
                for way, code in {"copy": COPY, "merge": OUR_WAY}.items():
                    runs.setdefault(f"{way}_{cache}", []).append(_run(code, arguments, base, merged, cache))
            for way, code in {"proof_warm": PROOF, "copy_unsynced_warm": COPY_UNSYNCED}.items():
                runs.setdefault(way, []).append(_run(code, arguments, base, merged, "warm"))
        runs["peft_warm"] = [_run(PEFT_WAY, arguments, base, merged, "warm")]
        result: dict[str, Any] = {
            "cores": cores,
            "model_bytes": sum(path.stat().st_size for path in base.iterdir()),
            "largest_shard_bytes": largest_shard,
            "bare_arithmetic_seconds": _bare_arithmetic(cores),
        }
        for way, rounds in runs.items():
            result[f"{way}_seconds"] = round(min(run["seconds"] for run in rounds), 2)
            result[f"{way}_start_seconds"] = round(min(run["start"] for run in rounds), 2)
            if not way.startswith("copy"):
                result[f"{way}_peak_anonymous_bytes"] = max(run["peak_anonymous"] for run in rounds)
        for cache in ("cold", "warm"):
            bound = max(result[f"copy_{cache}_seconds"], result["bare_arithmetic_seconds"])
            result[f"ratio_{cache}"] = round(result[f"merge_{cache}_seconds"] / bound, 2)
        result["peak_anonymous_in_shards"] = round(
            max(result["merge_cold_peak_anonymous_bytes"], result["merge_warm_peak_anonymous_bytes"]) / largest_shard,
            2,
        )
        result["proof_speed_over_copy"] = round(result["copy_unsynced_warm_seconds"] / result["proof_warm_seconds"], 2)
        result["proof_speed_over_copy_goal"] = 0.5
        return result
    finally:
        for path in (base, adapter, merged):
            shutil.rmtree(path, ignore_errors=True)


def _write_model(base: Path) -> int:
    """Write the model in shards of about 1 GB; return the largest one's size."""
    base.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (base / "config.json").write_text(json.dumps(config))
    (base / "tokenizer_config.json").write_text("{}")  # the proof refuses a base without one
    noise = torch.randn(1 << 26, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16()

    def weight(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return noise.repeat(-(-size // len(noise)))[:size].reshape(shape).clone()

    first = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": weight(HIDDEN)}
    shards = [first]
    for layer in range(LAYERS):
        if layer % LAYERS_PER_SHARD == 0:
            shards.append({})
        prefix = f"model.layers.{layer}"
        for name, shape in LINEAR_SHAPES.items():
            shards[-1][f"{prefix}.{name}.weight"] = weight(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shards[-1][f"{prefix}.{norm}.weight"] = weight(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            shards[-1][f"{prefix}.self_attn.{norm}.weight"] = weight(128)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, base / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        tensors.clear()
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.sync()
    return max(path.stat().st_size for path in base.iterdir())


def _write_adapter(adapter: Path) -> None:
    adapter.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in LINEAR_SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.01
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 32,
        "target_modules": [name.rpartition(".")[2] for name in LINEAR_SHAPES],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def _run(code: str, arguments: list[str], base: Path, merged: Path, cache: str) -> dict[str, float]:
    """Run one way in its own process; return seconds of the work, of the start, and peak anonymous memory."""
    if code != PROOF:  # it reads what the way before it left
        shutil.rmtree(merged, ignore_errors=True)
    os.sync()
    for path in base.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cache == "warm":
                while file.read(1 << 24):
                    pass
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "HF_HUB_OFFLINE": "1"}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", BEFORE + code + AFTER, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    peak = peak_anonymous(process)
    output, _ = process.communicate()
    whole = time.perf_counter() - begun
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode} from:\n{code}")
    seconds = float(output.split()[-1])
    return {"seconds": seconds, "start": whole - seconds, "peak_anonymous": peak}


def _bare_arithmetic(cores: int) -> float:
    """Time W + s · B · A for every layer, tensor by tensor in memory, with all of torch's threads."""
    torch.set_num_threads(cores)
    seconds = 0.0
    for rows, columns in LINEAR_SHAPES.values():
        weight = torch.full((rows, columns), 0.02, dtype=torch.bfloat16)
        a, b = torch.full((RANK, columns), 0.01), torch.full((rows, RANK), 0.01)
        merged, wide = torch.empty_like(weight), torch.empty(weight.shape)
        merged.zero_(), wide.zero_()  # the first access to memory that was never written takes time
        begun = time.perf_counter()
        for _ in range(LAYERS):
            merged.copy_(wide.copy_(weight).addmm_(b, a, alpha=2.0))
        seconds += time.perf_counter() - begun
    return round(seconds, 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as folder:
        cores = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
        print(json.dumps(bench_merge(Path(folder).resolve(), cores), indent=1))
