"""The weights of a finished run (`merged/RUN`) as a base model: just the files that the run published."""

from pathlib import Path

import msgspec

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import lies_within
from vlmflow.fetch.model_folder import FileRecord, hash_files

PROVENANCE = "provenance.json"
"""The account of a published run. It is none of the model's files: another licence does not train on other weights."""


class _Record(msgspec.Struct, frozen=True):
    """The used part of it (reports/accounts, Provenance)."""

    merged: dict[str, str]


def published_files(merged: Path, threads: int) -> dict[str, FileRecord]:
    """Return size and SHA-256 of the files that a run published, by name. threads: files that are read at a time.

    Raises VlmflowError if its provenance is missing or damaged, or with the names of files that are missing or have
    changed.
    """
    recorded = read_account(merged / PROVENANCE, _Record).merged
    if unsafe := [name for name in recorded if not lies_within(name)]:
        raise VlmflowError(
            f"{merged / PROVENANCE}: {unsafe[0]!r} is no name inside a folder",
            f"remove {merged} and run the same command again",
        )
    files = hash_files(merged, [name for name in recorded if (merged / name).is_file()], threads)
    if other := sorted(name for name in recorded if name not in files or files[name].sha256 != recorded[name]):
        raise VlmflowError(
            f"{merged}: {len(other)} files differ from those that {PROVENANCE} names: {', '.join(other[:5])}",
            f"remove {merged} and run the same command again: it is made again from the proven files",
        )
    return files
