"""Reads texts of jobs in the main process, from their storage: as data, with a size limit, following no link."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakemake.io import get_flag_value

from vlmflow.core.errors import VlmflowError
from vlmflow.core.stage_end import SHOWN_BYTES, end_of, plain
from vlmflow.remote.storage.fs_object import FsObject
from vlmflow.remote.storage.no_links import read_end

FETCHED_BYTES = 64 << 20
"""The size limit of a log or an account that is downloaded from object storage."""


def text_of(file: Any) -> str:
    """Return the end of a job's text file in storage, such as its log; "" if it does not exist.

    file: as Snakemake lists it (`job.log`).

    Raises WorkflowError if the storage cannot be reached, VlmflowError if the file is a link or too large.
    """
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
    return end_of(Path(file))


def copy_existing(workflow: Any, files: Iterable[tuple[str, str]], folder: Path) -> None:
    """Copy files of jobs from the default storage into a folder, those that exist, under their own names.

    files: targets, each with the name of a file in its folder, or "": then only an empty file shows that it exists.

    Raises WorkflowError if the storage cannot be reached, VlmflowError if a file is a link.
    """
    for target, name in files:
        named = workflow.modifier.path_modifier.apply_default_storage(target)
        content = get_flag_value(named, "storage_object").content(name, FETCHED_BYTES)
        if content is not None:
            (folder / target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / target / name).write_bytes(content)
