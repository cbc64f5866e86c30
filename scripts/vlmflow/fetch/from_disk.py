"""Places a raw data file, linked from the store or copied from this machine, with its account."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import remove, require_free_disk, whole_file
from vlmflow.core.integrity import read_files, refuse_changed, remember
from vlmflow.core.progress import Progress
from vlmflow.raw.signatures import not_a_file

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20


def link_or_copy(stored: Path, raw: Path) -> None:
    """Hard-link a file of the store; on different disks, copy it.

    Raises VlmflowError if the copy does not fit on its disk.
    """
    raw.parent.mkdir(parents=True, exist_ok=True)
    remove(raw)
    try:
        os.link(stored, raw)
    except OSError:
        copy(stored, raw)


def copy(source: Path, raw: Path) -> None:
    """Copy a file completely or not at all.

    Raises VlmflowError if it does not exist, is empty, cannot be read, or its copy does not fit on the disk.
    """
    if not source.is_file():
        raise not_a_file(source)
    if not source.stat().st_size:
        raise VlmflowError(f"{source} is empty", "name another data file (config: datasets)")
    require_free_disk(raw.parent, source.stat().st_size, f"a copy of {source}")
    progress = Progress(f"copying {source}", source.stat().st_size, "bytes")
    try:
        with source.open("rb") as original, whole_file(raw) as file, progress:
            while block := original.read(BLOCK_BYTES):
                file.write(block)
                progress.advance(len(block))
    except OSError as error:
        raise PassingError(
            f"copying {source} to {raw}: {error.strerror}",
            "check that it can be read, and that there is space to write; then run the same command again",
        ) from None


class RawAccount(msgspec.Struct):
    """What `raw/DATASET/.fetched/FILE.json` says of the raw file FILE."""

    bytes: int
    sha256: str


def write_raw_account(raw: Path, account: Path) -> None:
    """Write the account of a raw file, for the stages that read it."""
    began = time.time_ns()
    files = read_files(f"reading {raw}", "files", raw.parent, [raw.name])
    found = files[raw.name]
    logger.info("%s: %d bytes, sha256 %s", raw, found.size, found.sha256)
    write_account(account, RawAccount(found.size, found.sha256))
    remember(_record(raw), files, began)


def refuse_changed_raw(raw: Sequence[Path], accounts: Sequence[Path]) -> None:
    """Refuse raw files of a data set that have changed since they were fetched.

    accounts: the files that `write_raw_account` wrote for each of them; [] skips the check.

    Raises VlmflowError with the names of the files.
    """
    for file, account in zip(raw, accounts, strict=True) if accounts else ():
        next_step = f"remove {file} and run the same command again: the workflow fetches it again"
        recorded = read_account(account, RawAccount).sha256
        refuse_changed("raw files", file.parent, {file.name: recorded}, _record(file), next_step)


def _record(raw: Path) -> str:
    return f"raw/{raw.parent.name}"
