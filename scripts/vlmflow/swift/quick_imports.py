"""A quicker start for processes that import transformers and ms-swift (docs/benchmarks.md, Starts)."""

import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large libraries in this block, with the same result.

    Imports make a million objects that live as long as the process. The garbage collector looks through them again
    and again, so it pauses, and leaves them out afterwards too. transformers and trl each read the metadata of all
    installed packages; here they read it once.
    """
    read = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.cache(read)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        importlib.metadata.packages_distributions = read
