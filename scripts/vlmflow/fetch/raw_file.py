"""A raw data file put in its place: linked from the store, or copied from a path on this machine."""

import hashlib
import logging
import os
from pathlib import Path

from vlmflow.errors import PassingError, VlmflowError
from vlmflow.files import remove, require_free_disk, whole_file
from vlmflow.progress import Progress

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20


def link_or_copy(stored: Path, raw: Path) -> None:
    """Give a file of the store a second name; where the two are on different disks, a copy.

    Raises VlmflowError where the copy does not fit on its disk.
    """
    raw.parent.mkdir(parents=True, exist_ok=True)
    remove(raw)
    try:
        os.link(stored, raw)
    except OSError:
        copy(stored, raw)


def copy(source: Path, raw: Path) -> None:
    """Copy a file, whole or not at all, and log its size and SHA-256.

    Raises VlmflowError where there is no such file, it cannot be read, or its copy does not fit on the disk.
    """
    if not source.is_file():
        state = "is no file" if source.exists() else "does not exist"
        raise VlmflowError(f"{source} {state}", "give the path of the data file (config: datasets)")
    if not source.stat().st_size:
        raise VlmflowError(f"{source} is empty: it holds no rows", "give another data file (config: datasets)")
    require_free_disk(raw.parent, source.stat().st_size, f"a copy of {source}")
    digest = hashlib.sha256()
    progress = Progress(f"copying {source}", source.stat().st_size, "bytes")
    try:
        with source.open("rb") as original, whole_file(raw) as file, progress:
            while block := original.read(BLOCK_BYTES):
                digest.update(block)
                file.write(block)
                progress.advance(len(block))
    except OSError as error:
        raise PassingError(
            f"{source} to {raw}: {error.strerror}", "correct that and run the same command again"
        ) from None
    logger.info("%s: copied %s, %d bytes, sha256 %s", raw, source, raw.stat().st_size, digest.hexdigest())
