"""Bases in FP8: the same bits as transformers' own, and from rows to proven weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from families import FAMILIES, write_family
from forked_snakemake import called
from text_run import TRAIN
from tiny_models import file_names, in_fp8, write_base
from vlmflow.core.account import read_account
from vlmflow.fetch.dequantise import E4M3, dequantised, to_bfloat16
from vlmflow.fetch.model_files import CONFIG, INDEX
from vlmflow.fetch.model_weights import refuse_other_tensors
from vlmflow.fetch.placed import ModelManifest, digest_of, hash_files
from vlmflow.reports.provenance import Provenance
from vlmflow.tools.check_provenance import main as check_provenance
from workflow_runs import ROOT


def test_each_number_is_torchs() -> None:
    """All 256 codes of E4M3; rounding, of numbers of any size, and of those in the middle of two."""
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(torch.from_numpy(E4M3).nan_to_num(7e7), codes.view(torch.float8_e4m3fn).float().nan_to_num(7e7))
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32)
    bits = torch.cat(
        [bits, (bits & -65536) | 0x8000, (bits & -65536) | 0x7FFF, torch.arange(70_000, dtype=torch.int32)]
    )
    values = bits.view(torch.float32)[~bits.view(torch.float32).isnan()]
    assert torch.equal(torch.from_numpy(to_bfloat16(values.numpy()).view("i2")), values.bfloat16().view(torch.int16))


def loaded(folder: Path, **how: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights in memory, as transformers loads them on the CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", **how).state_dict()


@pytest.mark.parametrize(
    ("kind", "block", "scales"),
    [
        ("qwen3", (16, 8), torch.float32),
        ("qwen3", (8, 16), torch.bfloat16),
        ("qwen3", None, torch.float32),
        ("qwen3-moe", (8, 16), torch.bfloat16),
    ],
)
def test_the_bits_are_those_that_transformers_loads(
    kind: str, block: tuple[int, int] | None, scales: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    source = in_fp8(write_base(folder) if kind == "qwen3" else write_family(kind, folder), block, scales)
    files = hash_files(source, file_names(source), 2)
    made, records = dequantised(tmp_path / "store", source, files, 2)
    ours, theirs = loaded(made), loaded(source, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(ours[name].view(torch.int16), tensor.view(torch.int16)), name
    refuse_other_tensors(made, records)
    stored = [tensor for shard in made.glob("*.safetensors") for tensor in load_file(shard).values()]
    assert json.loads((made / INDEX).read_text())["metadata"] == {"total_size": sum(each.nbytes for each in stored)}
    assert "quantization_config" not in json.loads((made / CONFIG).read_text())
    same = {name for name in files.keys() & records.keys() if files[name] == records[name]}
    assert same == {name for name in files if not name.endswith(".safetensors") and name not in (CONFIG, INDEX)}


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    """A block has the size that config.json says. transformers divides a matrix evenly by the number of its scales."""
    source = in_fp8(write_base(tmp_path / "base"), (32, 20))
    tensors = {name: one for shard in source.glob("*.safetensors") for name, one in load_file(shard).items()}
    made, _ = dequantised(tmp_path / "store", source, hash_files(source, file_names(source), 2), 2)
    ours = {name: one for shard in made.glob("*.safetensors") for name, one in load_file(shard).items()}
    uneven = 0
    for name, tensor in ours.items():
        if (scales := tensors.get(f"{name}_scale_inv")) is None:
            assert torch.equal(tensor, tensors[name])
            continue
        rows, columns = tensor.shape
        uneven += bool(rows % 32 and columns % 20)
        of_each = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(20, 1)[:, :columns]
        assert torch.equal(tensor, (tensors[name].float() * of_each).bfloat16()), name
    assert uneven


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_a_base_in_fp8_becomes_proven_weights(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    """From rows on, through the workflow's own rules. The published weights name both forms of their base."""
    record_property("road", f"{kind}-fp8")
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    base = in_fp8(write_family(kind, tmp_path / "base"), (16, 16), torch.bfloat16)
    in_the_base = {file.name: file.read_bytes() for file in base.iterdir()}
    family = FAMILIES[kind]
    model = {"source": str(base), "model_type": family.model_type, "template": family.template}
    model |= {"template_differs": True, "dequantize": True}
    train = TRAIN | {"swift_args": {}, "max_length": 1024, "dtype": "bfloat16"}
    run = {"model": "tiny", "dataset": "alpaca", "device": "cpu", "train": train, "tuner": "lora"}
    run["smoke"] = {"steps": 6, "longest": 4, "sample": 4}
    data = {"alpaca": {"train": "rows.json", "system_prompt": "Be brief.", "val_share": 0.1}}
    config = {"models": {"tiny": model}, "datasets": data, "runs": {"mine": run}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    done = called([*call, "--configfile", str(tmp_path / "mine.yaml"), "--cores", "2", "--", "merged/mine"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]

    merged = tmp_path / "merged" / "mine"
    manifest = read_account(tmp_path / "models" / "tiny" / "manifest.json", ModelManifest)
    facts = read_account(merged / "provenance.json", Provenance).base_model
    assert facts.digest == manifest.digest
    assert facts.dequantized_from.digest == digest_of(hash_files(base, file_names(base), 2))
    assert "is in FP8. Its weights became bfloat16" in (merged / "README.md").read_text()
    assert "quantization_config" not in json.loads((merged / CONFIG).read_text())
    assert check_provenance(merged, None)
    assert "ok        files in FP8 of the base model" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in base.iterdir()} == in_the_base
    (base / "tokenizer_config.json").write_text("{}")
    assert not check_provenance(merged, None)
    assert "DIFFERS   files in FP8 of the base model" in capsys.readouterr().out
