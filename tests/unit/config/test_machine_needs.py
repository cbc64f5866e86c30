"""Packages, compilers and GPUs that settings need, and that may be missing: the locked environment has none of them."""

import re
from pathlib import Path

import pytest

from vlmflow.config.machine_needs import missing_tools, refuse_missing, refuse_missing_compiler, refuse_old_driver
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import STRATEGIES
from vlmflow.core.errors import VlmflowError

FLASH = TrainSettings(attention="flash_attention_2")


def module(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a module importable."""
    (folder / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))


def nvidia_smi(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of the driver's name, which prints these lines, before all others."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_settings_of_the_locked_environment_need_nothing() -> None:
    refuse_missing(TrainSettings())


@pytest.mark.parametrize(
    ("settings", "said", "step"),
    [
        (FLASH, "attention: flash_attention_2: the package flash_attn is not installed", "or set attention: sdpa"),
        (TrainSettings(attention="flash_attention_3"), "the package flash_attn_interface is not", "docs/training.md"),
        (TrainSettings(liger=True), "train.liger: the package liger-kernel is not installed here", "or remove liger"),
    ],
)
def test_a_missing_package_is_named(settings: TrainSettings, said: str, step: str) -> None:
    with pytest.raises(VlmflowError, match=said) as error:
        refuse_missing(settings)
    assert step in error.value.next_step


def test_an_older_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "flash_attn", monkeypatch)
    nvidia_smi(tmp_path, "NVIDIA A100-SXM4-80GB, 8.0\\nTesla T4, 7.5\\n", monkeypatch)
    with pytest.raises(VlmflowError, match=r"Tesla T4 has compute capability 7\.5; it needs .* 8\.0 or newer"):
        refuse_missing(FLASH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    refuse_missing(FLASH)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(tmp_path, "NVIDIA H100 80GB HBM3, 9.0\\n[N/A], [N/A]\\n", monkeypatch)
    refuse_missing(FLASH)


def test_a_driver_that_is_too_old_for_cuda_13_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lines in ("580.65.06\\n", "999.1\\n", "GPU 0: a card\\n", ""):
        nvidia_smi(tmp_path, lines, monkeypatch)
        refuse_old_driver()
    nvidia_smi(tmp_path, "570.211.01\\n570.211.01\\n", monkeypatch)
    with pytest.raises(VlmflowError, match=r"NVIDIA driver 570\.211\.01 is too old .* CUDA 13"):
        refuse_old_driver()
    with monkeypatch.context() as compatible:
        (tmp_path / "compat").mkdir()
        (tmp_path / "compat" / "libcuda.so.1").touch()
        compatible.setenv("LD_LIBRARY_PATH", f"/gone::{tmp_path}/compat")
        refuse_old_driver()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    refuse_old_driver()


def test_liger_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "liger_kernel", monkeypatch)
    refuse_missing(TrainSettings(liger=True))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VlmflowError, match="no C compiler here"):
        refuse_missing(TrainSettings(liger=True))


def test_a_machine_without_compiler_is_refused_by_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("zero2_offload", "zero3_offload"):
        missing = rf"C\+\+ compiler \(no-such-compiler\), no header of Python \({tmp_path}/Python.h\)"
        with pytest.raises(VlmflowError) as error:
            refuse_missing_compiler(STRATEGIES[name])
        assert re.fullmatch(rf"runs.NAME.strategy: {name}: .* has no {missing}", error.value.cause)
    for name in ("ddp", "zero2", "zero3", "fsdp2"):
        refuse_missing_compiler(STRATEGIES[name])


def test_ninja_is_found_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the locked environment, which nobody need activate."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ninja" not in missing_tools()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "ninja" in missing_tools()
