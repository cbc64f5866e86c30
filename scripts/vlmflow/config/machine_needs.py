"""What some settings need of the machine that trains.

These are packages that the environment lacks, a compiler, and a newer GPU or driver.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import Strategy
from vlmflow.core.errors import VlmflowError

INSTALL = "install it into the training environment as docs/training.md says (Faster attention and kernels)"

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The module of each kind of flash attention, as transformers looks for it (utils/import_utils.py)."""

OLDEST_GPU = {"flash_attention_2": 8.0, "flash_attention_3": 9.0}
"""The compute capability from which on each works: Ampere, Hopper (the packages' own pages)."""

COMPILERS = ("cc", "gcc", "clang")


OLDEST_DRIVER = 580
"""The first NVIDIA driver for CUDA 13, with which the locked PyTorch is built."""


def refuse_old_driver() -> None:
    """Raise VlmflowError if this machine's NVIDIA driver is too old for the locked PyTorch; without one it may pass.

    NVIDIA's package cuda-compat, whose libcuda LD_LIBRARY_PATH names, lets older drivers of data-centre GPUs pass.
    """
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any(Path(folder, "libcuda.so.1").exists() for folder in folders):
        return
    version = next(iter(_ask_driver("driver_version")), "")
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) < OLDEST_DRIVER:
        raise VlmflowError(
            f"NVIDIA driver {version} is too old for the locked PyTorch, which has CUDA 13",
            f"update it to {OLDEST_DRIVER} or newer, put NVIDIA's cuda-compat into LD_LIBRARY_PATH, or train elsewhere",
        )


def refuse_missing(settings: TrainSettings) -> None:
    """Refuse settings for which this machine lacks something.

    Raises VlmflowError with the key, what is missing, and what to do, for the first one.
    """
    for key, fault, next_step in _missing(settings):
        raise VlmflowError(f"runs.NAME.train.{key}: {fault}", next_step)


def _missing(settings: TrainSettings) -> Iterator[tuple[str, str, str]]:
    attention = settings.attention
    if attention in PACKAGES:
        key = f"attention: {attention}"
        if importlib.util.find_spec(PACKAGES[attention]) is None:
            yield key, f"the package {PACKAGES[attention]} is not installed here", f"{INSTALL}, or set attention: sdpa"
        if (gpu := oldest_gpu()) and gpu[1] < OLDEST_GPU[attention]:
            needed = f"it needs compute capability {OLDEST_GPU[attention]} or newer"
            yield key, f"{gpu[0]} has compute capability {gpu[1]}; {needed}", "set attention: sdpa"
    if settings.liger:
        if importlib.util.find_spec("liger_kernel") is None:
            yield "liger", "the package liger-kernel is not installed here", f"{INSTALL}, or remove liger"
        if not any(map(shutil.which, COMPILERS)):
            yield "liger", f"no C compiler here ({', '.join(COMPILERS)})", "install gcc, or remove liger"


def oldest_gpu() -> tuple[str, float] | None:
    """Return name and compute capability of this machine's oldest GPU, as its driver lists them; None without one.

    With CUDA_VISIBLE_DEVICES, of the newest one: its numbers are CUDA's own, which differ from the driver's.
    """
    lines = _ask_driver("name,compute_cap")
    parts = [line.rpartition(",") for line in lines]
    gpus = [(name.strip(), float(capability)) for name, _, capability in parts if _is_number(capability)]
    choose = max if os.environ.get("CUDA_VISIBLE_DEVICES") else min
    return choose(gpus, key=lambda gpu: gpu[1], default=None)


def _ask_driver(fields: str) -> list[str]:
    """Return what the driver's program says of each GPU; [] without it, or if it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    call = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines()
    except subprocess.TimeoutExpired:
        return []  # the training itself shows what is wrong with the driver


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()


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
    tools = {
        f"C++ compiler ({compiler[0]})": shutil.which(compiler[0]),
        "ninja": shutil.which("ninja", path=search_path()),
        f"header of Python ({header})": header.is_file(),
    }
    return [name for name, is_there in tools.items() if not is_there]


def search_path() -> str:
    """Return PATH with the folder of this Python first, in which the locked environment has ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
