"""Child processes that run ms-swift, or foreign code within limits, and a quicker start for those that import much.

A child that runs ms-swift has its environment, and tells the cause of a failure. What a model's owner wrote is read in
a child with limits of memory and time. The start is described in docs/benchmarks.md, Starts.
"""

import functools
import gc
import importlib.metadata
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlmflow.core.child_programs import THREADS_OF_LIBRARIES, child_environment
from vlmflow.core.errors import VlmflowError
from vlmflow.core.processes import bound_to_this_process, import_path
from vlmflow.pictures.budget import FEWEST_TOKENS

OF_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
"""A logger that, on CPUs with AVX512-BF16, warns at the import that an optional package is missing."""


IMAGE_MAX_TOKENS = "IMAGE_MAX_TOKEN_NUM"
"""ms-swift's variable for the most tokens of a picture."""

FAULT = re.compile(r"(?m)^(?:[\w.]*\.)?(\w*(?:Error|Exception): .*)")

MEMORY = 1 << 30
"""Bytes that a limited child may have more than this process."""

SECONDS = 60
"""Processor time that the child may take; it takes a few milliseconds per row, and a second for the largest model."""

WAIT = 20 * SECONDS
"""Seconds until a child that computes nothing is given up; on a busy machine it may wait for long."""

TOO_MUCH = {"failed": f"more than {MEMORY / 1e9:.1f} GB of memory"}

MOST_CHARS = 500
"""Characters that are kept of an error."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large libraries in this block, with the same result.

    Imports make a million objects that live as long as the process. The garbage collector looks through them again
    and again, so it pauses, and leaves them out afterwards too. transformers and trl each read the metadata of all
    installed packages; here they read it once. peft imports bitsandbytes, whose warning says nothing of a stage's work.
    """
    logging.getLogger(OF_BITSANDBYTES).addFilter(_is_no_advice)
    read = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.cache(read)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        importlib.metadata.packages_distributions = read


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Return whether a message is more than the advice to install the package `kernels`."""
    return "pip install kernels" not in record.getMessage()


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

    return sorted({torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())})


def run_module(module: str, words: list[str], folder: Path, env: dict[str, str], log: Path, label: str) -> None:
    """Run a Python module in `folder` to its end, with its output in `log`.

    label: its name for messages. Raises VlmflowError with the last error of its output if it fails.
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
        raise failed(label, log, done.returncode)


class ChildFailedError(VlmflowError):
    """A program that this one started ended with an error, or was killed."""


def failed(label: str, log: Path, code: int) -> ChildFailedError:
    """Return the error for a process that ended with an exit code other than 0: the last error in its log."""
    text = log.read_text(errors="replace")
    faults = FAULT.findall(text)
    cause = faults[-1].strip() if faults else f"ms-swift ended with code {code}"
    return ChildFailedError(f"{label}: {cause}", f"see ms-swift's output:\n{text[-2_000:]}")


def limited(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns, JSON values, from a fork of this process: it must start no threads.

    Returns {"failed": why} if it raises anything, or goes beyond a limit.
    """
    context = multiprocessing.get_context("fork")  # the libraries are loaded
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(bound_to_this_process(), sender, work))
    child.start()
    sender.close()
    try:
        if not receiver.poll(WAIT):
            return {"failed": f"not done after {WAIT} s"}
        result: dict[str, Any] = json.loads(receiver.recv_bytes())
        return result
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return {"failed": f"not done after {SECONDS} s of processor time"}
        if child.exitcode in (0, 1):  # Python's own end, without a word: not even its error could be told
            return TOO_MUCH
        return {"failed": f"its process ended with code {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as the result of work."""
    return {"failed": f"{type(error).__name__}: {error}"[:MOST_CHARS]}


def _work(bind: Callable[[], None], sender: Connection, work: Callable[[], dict[str, Any]]) -> None:
    bind()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    try:
        result = work()
    except Exception as error:  # whatever their text does; PyTorch raises a RuntimeError where its C++ has no memory
        result = TOO_MUCH if isinstance(error, MemoryError) or "bad_alloc" in str(error) else failure(error)
    sender.send_bytes(json.dumps(result).encode())
