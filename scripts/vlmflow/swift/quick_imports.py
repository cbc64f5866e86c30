"""A quicker start for processes that import transformers and ms-swift (docs/benchmarks.md, Starts)."""

import functools
import gc
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager

OF_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
"""A logger that, on CPUs with AVX512-BF16, warns at the import that an optional package is missing."""


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
