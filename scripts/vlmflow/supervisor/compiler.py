"""What DeepSpeed needs to compile its optimizer for the CPU, when a training that offloads starts.

It compiles through PyTorch (torch/utils/cpp_extension.py) into the user's cache (`TORCH_EXTENSIONS_DIR`), once per
machine and version, in about a minute.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from vlmflow.config.strategies import Strategy
from vlmflow.core.errors import VlmflowError


def refuse_missing_compiler(strategy: Strategy) -> None:
    """Raise VlmflowError with what is missing on this machine, if the strategy needs a compiler."""
    missing = missing_tools() if strategy.needs_compiler else []
    if missing:
        raise VlmflowError(
            f"runs.NAME.strategy: {strategy.name}: DeepSpeed compiles its optimizer for the CPU, and this machine has "
            f"no {', no '.join(missing)}",
            "install them (Debian: apt-get install g++ python3-dev), or train with a strategy that does not offload "
            "the optimizer",
        )


def missing_tools() -> list[str]:
    """Return what this machine lacks of compiler, ninja, and Python's C headers."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    found = {
        f"C++ compiler ({compiler[0]})": shutil.which(compiler[0]),
        "ninja": shutil.which("ninja", path=search_path()),
        f"header of Python ({header})": header.is_file(),
    }
    return [name for name, is_there in found.items() if not is_there]


def search_path() -> str:
    """Return PATH with the folder of this Python first, in which the locked environment has ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
