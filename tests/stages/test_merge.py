"""Compare the merge with peft's, and test interrupted and impossible merges."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from made_accounts import report_of
from tiny_models import (
    VARIANTS,
    file_names,
    peft_merged,
    tensors_of,
    write_adapter,
    write_base,
    write_gpt2,
    write_wide_adapter,
    write_wide_base,
)
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.fetch.model_weights import read_header
from vlmflow.fetch.placed import MANIFEST, ModelManifest, digest_of, hash_files
from vlmflow.merging.merge import merge_weights
from workflow_runs import ROOT


def merge(base: Path, adapter: Path, merged: Path, threads: int = 2) -> dict[str, torch.Tensor]:
    merge_weights(base, adapter, merged, file_names(base), threads)
    return tensors_of(merged)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("float32") / "base", attention_bias=True)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16."""
    return write_base(tmp_path_factory.mktemp("bfloat16") / "base", torch.bfloat16, attention_bias=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_peft(base: Path, tmp_path: Path, variant: str) -> None:
    """Merged equals base + adapter, to float32's accumulation."""
    adapter = write_adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    merged = merge(base, adapter, tmp_path / "merged")
    expected = peft_merged(base, adapter)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6, msg=name)
    original = tensors_of(base)
    assert any(not torch.equal(merged[name], original[name]) for name in merged)


@pytest.mark.parametrize(
    ("variant", "adapter_dtype"),
    [
        *((variant, torch.float32) for variant in VARIANTS),
        ("all linear layers", torch.bfloat16),
        *(pytest.param(variant, torch.bfloat16, marks=pytest.mark.slow) for variant in list(VARIANTS)[1:]),
    ],
)
def test_bfloat16_equals_peft(half: Path, tmp_path: Path, variant: str, adapter_dtype: torch.dtype) -> None:
    """Both peft and we add in float32 and round once, so only sums next to a tie differ, by one step.

    For embeddings peft rounds the update before it adds it, and then the sum: up to half a step of each.
    """
    adapter = write_adapter(half, tmp_path / "adapter", adapter_dtype, **VARIANTS[variant])
    merged = merge(half, adapter, tmp_path / "merged")
    original = tensors_of(half)
    for name, tensor in peft_merged(half, adapter).items():
        ours, theirs = merged[name].float(), tensor.bfloat16().float()
        allowed, share = theirs.abs() * 2**-7, 1e-3
        if variant == "embedding" and "embed_tokens" in name:
            allowed, share = allowed + (theirs - original[name].float()).abs() * 2**-7, 0.5
        assert ((ours - theirs).abs() <= allowed).all(), name
        assert (ours != theirs).float().mean() < share, name


def test_transposed_layers_equal_peft(tmp_path: Path) -> None:
    """GPT-2's layers store in × out (fan_in_fan_out)."""
    base = write_gpt2(tmp_path / "base")
    lora = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    adapter = write_adapter(base, tmp_path / "adapter", **lora)
    merged = merge(base, adapter, tmp_path / "merged")
    for name, tensor in peft_merged(base, adapter).items():
        if name in merged:
            torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert not torch.equal(
        merged["transformer.h.0.mlp.c_fc.weight"], tensors_of(base)["transformer.h.0.mlp.c_fc.weight"]
    )


def test_laid_out_as_the_base(tmp_path: Path) -> None:
    """The same files, the same headers; what the adapter does not touch, byte for byte."""
    base = write_base(tmp_path / "base", torch.bfloat16)
    (base / "pytorch_model.bin").write_bytes(b"unmerged")
    (base / "extra" / "deep").mkdir(parents=True)
    (base / "extra" / "deep" / "notes.txt").write_bytes(b"\0\xff notes")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merged = tmp_path / "merged"
    merge(base, adapter, merged)
    assert file_names(merged) == [name for name in file_names(base) if name != "pytorch_model.bin"]
    for name in file_names(merged):
        if not name.endswith(".safetensors"):
            assert (merged / name).read_bytes() == (base / name).read_bytes(), name
            continue
        header = read_header(base / name)
        ours, theirs = (merged / name).read_bytes(), (base / name).read_bytes()
        assert ours[: header.data_begin] == theirs[: header.data_begin]
        for tensor, entry in header.tensors.items():
            same = ours[entry.begin : entry.end] == theirs[entry.begin : entry.end]
            assert same == ("q_proj" not in tensor), tensor


def test_existing_folder_is_replaced(tmp_path: Path) -> None:
    """Neither a folder of that name nor the rest of a killed merge makes the merge skip or mix anything."""
    base = write_base(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    for folder in (tmp_path / "merged", unfinished(tmp_path / "merged")):
        folder.mkdir()
        (folder / "config.json").write_text("of another merge")
        (folder / "stale.safetensors").write_text("of another merge")
    merged = merge(base, adapter, tmp_path / "merged")
    assert "stale.safetensors" not in file_names(tmp_path / "merged")
    assert not unfinished(tmp_path / "merged").exists()
    assert not torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], tensors_of(base)["model.layers.0.mlp.up_proj.weight"]
    )


def test_a_failed_merge_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", torch.float16)
    merge(base, write_adapter(base, tmp_path / "adapter"), tmp_path / "merged")
    before = hash_files(tmp_path / "merged", file_names(tmp_path / "merged"), 1)
    too_large = write_adapter(base, tmp_path / "too-large", lora_alpha=10**7, target_modules=["up_proj"])
    with pytest.raises(
        VlmflowError, match=r"up_proj\.weight, rows 0 to \d+: a merged value is NaN or too large for F16"
    ):
        merge(base, too_large, tmp_path / "merged")
    assert hash_files(tmp_path / "merged", file_names(tmp_path / "merged"), 1) == before


def test_full_disk_is_seen_before(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with (base / "video.bin.txt").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(VlmflowError, match=r"the merged model needs 8796\.\d+ GB"):
        merge(base, write_adapter(base, tmp_path / "adapter"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 226 MB in 3 shards, its manifest, an adapter, and an unbroken merge on one thread."""
    folder = tmp_path_factory.mktemp("wide")
    base = write_wide_base(folder / "base", layers=6, shards=3)
    files = hash_files(base, file_names(base), 2)
    write_account(folder / "model" / MANIFEST, ModelManifest("wide", "base", None, base, files, [], digest_of(files)))
    merge_weights(base, write_wide_adapter(folder / "adapter", layers=6), folder / "unbroken", file_names(base), 1)
    return folder


def test_tensors_of_many_blocks(wide: Path) -> None:
    """Every row of a tensor that is cut into tasks and blocks, against the sum in float64."""
    base, adapter = tensors_of(wide / "base"), load_file(wide / "adapter" / "adapter_model.safetensors")
    for name, tensor in tensors_of(wide / "unbroken").items():
        a, b = (adapter[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
        exact = base[name].double() + 2 * (b.double() @ a.double())
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-6, atol=2e-5, msg=name)


def merge_command(folder: Path, merged: Path) -> list[str]:
    script = ROOT / "scripts" / "stages" / "merge_weights.py"
    command = [sys.executable, str(script), "--model", str(folder / "model"), "--full", str(folder / "adapter")]
    return [*command, "--merged", str(merged), "--threads", "2"]


def test_killed_and_run_again_gives_the_same_bytes(wide: Path, tmp_path: Path) -> None:
    """SIGKILL at three moments, then the same command: in the end the bytes of one uninterrupted thread."""
    merged = tmp_path / "merged"
    for size in (1, 60_000_000, 130_000_000):
        process = subprocess.Popen(merge_command(wide, merged), stderr=subprocess.DEVNULL)
        while written_bytes(unfinished(merged)) < size:
            assert process.poll() is None, "the merge ended before it could be killed"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert unfinished(merged).exists()
        assert not merged.exists()
    subprocess.run(merge_command(wide, merged), check=True, stderr=subprocess.DEVNULL)
    names = file_names(merged)
    assert hash_files(merged, names, 2) == hash_files(wide / "unbroken", names, 2)
    assert names == file_names(wide / "unbroken")


def written_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the next attempt removes what the killed one left
            total += path.stat().st_size
    return total


MEASURE = """
import re, sys, threading, time
from pathlib import Path
from vlmflow.merging.merge import merge_weights
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before, peak = anonymous(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
base, adapter, merged = map(Path, sys.argv[1:])
merge_weights(base, adapter, merged, [path.name for path in base.iterdir()], 2)
print(peak - before)
"""


def test_memory_does_not_grow_with_the_model(wide: Path, tmp_path: Path) -> None:
    """Merging 226 MB in shards of 75 MB takes less than half a shard, beyond the imports."""
    scripts = str(ROOT / "scripts")
    command = [sys.executable, "-c", MEASURE, str(wide / "base"), str(wide / "adapter"), str(tmp_path / "merged")]
    # The other tests' processes keep freed memory (conftest.py), which would count here.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**env, "PYTHONPATH": scripts})
    assert int(done.stdout) * 1024 < 37_500_000


def test_the_script_reports_what_is_wrong(wide: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    write_account(adapter / "report.json", report_of(adapter))
    command = merge_command(wide, tmp_path / "merged")
    command[command.index("--full") + 1] = str(adapter)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the stage failed: " in done.stderr
    assert 'peft_type = "LOHA"' in done.stderr
    assert "what to do: " in done.stderr
    assert "Traceback" not in done.stderr
