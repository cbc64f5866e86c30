"""Runs ms-swift in a child process: its environment, and the cause of a failure."""

import os
import re
import subprocess
import sys
from pathlib import Path

from vlmflow.core.child_environment import THREADS_OF_LIBRARIES, child_environment
from vlmflow.core.errors import VlmflowError
from vlmflow.core.process import bound_to_this_process, import_path
from vlmflow.pictures.budget import FEWEST_TOKENS

IMAGE_MAX_TOKENS = "IMAGE_MAX_TOKEN_NUM"
"""ms-swift's variable for the most tokens of a picture."""

FAULT = re.compile(r"(?m)^(?:[\w.]*\.)?(\w*(?:Error|Exception): .*)")


def environment(pictures: Path, image_max_tokens: int, cache: Path, threads: int) -> dict[str, str]:
    """Return ms-swift's environment: offline, with the picture store and budget, and caches in the folder `cache`.

    threads: cores that one process may use.
    """
    return child_environment() | {
        "PYTHONPATH": import_path(),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "USE_HF": "1",  # otherwise ms-swift uses ModelScope
        "ROOT_IMAGE_DIR": str(pictures.absolute()),
        "IMAGE_MIN_TOKEN_NUM": str(FEWEST_TOKENS),
        IMAGE_MAX_TOKENS: str(image_max_tokens),
        # Several processes that each use all cores are 4 to 6 times slower. Snakemake sets each of these to the rule's
        # threads, and MKL prefers its own variable to OpenMP's.
        **dict.fromkeys(THREADS_OF_LIBRARIES, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": str(cache.absolute()),
        "MODELSCOPE_CACHE": str(cache.absolute()),
        "HF_DATASETS_CACHE": str((cache / "datasets").absolute()),
        "MPLCONFIGDIR": str((cache / "matplotlib").absolute()),
    }


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # only here: it takes seconds

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


def gpu_products() -> list[str]:
    """Return the products of the GPUs that this process may use, each once, sorted."""
    import torch

    return sorted({torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())})


def run_module(module: str, words: list[str], folder: Path, env: dict[str, str], log: Path, what: str) -> None:
    """Run a Python module in `folder` to its end, with its output in `log`.

    what: its name for messages. Raises VlmflowError with the last error of its output if it fails.
    """
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,  # ms-swift searches for a picture in the working directory first
            env=env,
            preexec_fn=bound_to_this_process(),
            check=False,
        )
    if done.returncode:
        raise failed(what, log, done.returncode)


class ChildFailedError(VlmflowError):
    """A program that this one started ended with an error, or was killed."""


def failed(what: str, log: Path, code: int) -> ChildFailedError:
    """Return the error for a process that ended with an exit code other than 0: the last error in its log."""
    text = log.read_text(errors="replace")
    faults = FAULT.findall(text)
    cause = faults[-1].strip() if faults else f"ms-swift ended with code {code}"
    return ChildFailedError(f"{what}: {cause}", f"see ms-swift's output:\n{text[-2_000:]}")
