"""What DeepSpeed needs to compile its optimizer for the CPU."""

import re
from pathlib import Path

import pytest

from vlmflow.config.machine_needs import missing_tools, refuse_missing_compiler
from vlmflow.config.strategies import STRATEGIES
from vlmflow.core.errors import VlmflowError


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
