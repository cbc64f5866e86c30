"""Reads a job's log in the main process, from any storage: as data, with a size limit, following no link."""

import asyncio
from pathlib import Path
from typing import Any

from harness.plain_text import plain
from harness.storage.fs_object import FsObject
from harness.storage.no_links import read_end
from vlmflow.core.errors import VlmflowError

SHOWN_BYTES = 1 << 20
"""How much of a log's end is read."""

FETCHED_BYTES = 64 << 20
"""The size limit of a log that is downloaded from object storage."""


def text_of(file: Any) -> str:
    """Return the end of a job's text file, such as its log; "" if it does not exist.

    file: as Snakemake lists it (`job.log`): a local path, or a target in storage.

    Raises WorkflowError if the storage cannot be reached, VlmflowError if the file is a link or too large.
    """
    if not file.is_storage:
        return _end_of(Path(file)) if Path(file).is_file() else ""
    target = file.storage_object
    if not target.exists():
        return ""
    if isinstance(target, FsObject):
        return plain(read_end(target.query_path, SHOWN_BYTES).decode(errors="replace"))
    if target.size() > FETCHED_BYTES:
        raise VlmflowError(
            f"{target.query} has {target.size():,} bytes; the limit of a log is {FETCHED_BYTES:,}",
            "read it in the storage",
        )
    asyncio.run(target.managed_retrieve())
    return _end_of(Path(file))


def _end_of(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - SHOWN_BYTES))
        return plain(stream.read(SHOWN_BYTES).decode(errors="replace"))
