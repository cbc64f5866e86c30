"""Which GPUs each measuring process gets, on machines that these tests do not have."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.asking import OwnModel
from vlmflow.evaluation.measure import Measurement, ScoredModel, _gpus_of_processes


def how(folder: Path, processes: int = 1, device: str = "cuda") -> Measurement:
    return Measurement("qwen3", {}, "last_round", folder, 64, 512, device, "bfloat16", processes, 1)


def places(folder: Path, processes: int) -> list[str | None]:
    return _gpus_of_processes(ScoredModel("it", folder, "digest"), how(folder, processes))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 100 bytes, on a machine with four GPUs of 1,000 bytes."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=1000))
    return tmp_path


@pytest.mark.parametrize("unset", [None, ""])
def test_without_the_variable_processes_take_the_first_gpus(
    model: Path, unset: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if unset is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unset)
    assert places(model, 1) == ["0"]
    assert places(model, 4) == ["0", "1", "2", "3"]


def test_with_the_variable_they_take_those_that_it_names(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    assert places(model, 2) == ["3", "GPU-5f"]
    with pytest.raises(VlmflowError, match="the run has 3 processes, and this machine 2 GPUs"):
        places(model, 3)


def test_a_model_that_one_gpu_does_not_hold_gets_several(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (model / "model.safetensors").write_bytes(b"x" * 1500)
    assert places(model, 4) == ["0,1", "2,3"]
    assert places(model, 3) == ["0,1"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_one_gpu_product_computed_is_not_that_of_another(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither losses nor answers; on the CPU GPUs do not count."""

    def meanings(products: list[str]) -> tuple[Any, Any]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(products))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: products[number])
        scored, asked = (
            ScoredModel("it", tmp_path, "digest"),
            OwnModel("it", "digest", tmp_path, 64, "bfloat16", device, 1),
        )
        return how(tmp_path, device=device).meaning(scored), asked.meaning

    h100, same, mixed = (meanings(products) for products in (["H100"] * 2, ["H100"], ["H100", "A100"]))
    assert h100 == same
    for ours, theirs in zip(h100, mixed, strict=True):
        assert (ours == theirs) == (device == "cpu")
