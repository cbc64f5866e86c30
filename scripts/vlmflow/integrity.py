"""Files that an earlier stage left, held beside the digests that it recorded: they are still those, or a stage refuses.

A digest costs a reading of the whole file. So a file's size, mtime and inode are kept beside the digest that it had
when it was last read: one that looks as it did then has it still. Records lie in the stores, never among the targets,
which are the same bytes on every machine; one that is missing, or was made elsewhere, only has the files read again.
"""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path
from stat import S_ISREG
from typing import Literal

import msgspec

from vlmflow.errors import VlmflowError
from vlmflow.files import read_json, sha256_of, whole_file
from vlmflow.progress import Progress

Integrity = Literal["quick", "full"]

LEVEL = "VLMFLOW_INTEGRITY"
"""The environment variable with the configuration's `integrity`. No rule has it as a param: another value is no reason
to train again."""

RECORDS = "VLMFLOW_RECORDS"
"""The environment variable with the folder of the records; without it every file is read."""

RECORDS_FOLDER = ".seen"
"""Where they lie in `stores.pictures`."""

READERS = 8
"""Files that are read at a time; hashlib lets go of the interpreter's lock."""

CLOCK_NS = 100_000_000
"""A file may change twice within one tick of a disk's clock: one that changed this recently is not recorded."""

NAMED = 5
"""Files that an error names."""


class Seen(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a file looked when it was read, and the SHA-256 that it had. mtime: in ns.

    The time of its last change of state (ctime) is left out: one more hard link, or one less, is such a change.
    """

    size: int
    mtime: int
    inode: int
    sha256: str


Record = dict[str, Seen]


def refuse_changed(what: str, folder: Path, digests: Mapping[str, str], record: str, next_step: str) -> None:
    """Refuse files that are gone, or have not the digest that an earlier stage recorded.

    what: the files, as people name them ("pictures"). digests: SHA-256 by name in `folder`.
    record: the name of their record, the same in every stage ("pictures/fire").
    next_step: what a person can do where some are not the same.

    Raises VlmflowError with how many, and the first of their names.
    """
    gone, changed = compare(what, folder, digests, record)
    faults = [(changed, "have changed since they were checked"), (gone, "are gone")]
    said = [
        f"{len(names):,} of {len(digests):,} {what} {fault}: {', '.join(names[:NAMED])}"
        for names, fault in faults
        if names
    ]
    if said:
        raise VlmflowError(f"{folder}: {'; '.join(said)}", next_step)


def compare(what: str, folder: Path, digests: Mapping[str, str], record: str) -> tuple[list[str], list[str]]:
    """Give the names of the files that are gone, and of those with another digest than expected, sorted.

    The parameters are those of `refuse_changed`. With `integrity: full` every file is read, with quick those that do
    not look as they did when they had their digest.
    """
    place = _place_of(record)
    seen = _read(place)
    full = os.environ.get(LEVEL) == "full"
    gone: list[str] = []
    doubtful: list[str] = []
    for name, sha256 in digests.items():
        try:
            found = os.stat(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            gone.append(name)
            continue
        if not S_ISREG(found.st_mode):  # a pipe would have us wait for ever
            gone.append(name)
        elif full or seen.get(name) != _looks(found, sha256):
            doubtful.append(name)
    read = _hash(what, folder, doubtful)
    changed = [name for name in doubtful if name in read and read[name].sha256 != digests[name]]
    gone += [name for name in doubtful if name not in read]
    right = {name: look for name, look in read.items() if look.sha256 == digests[name] and _is_settled(look)}
    if place and any(seen.get(name) != look for name, look in right.items()):
        remember(record, right)
    return sorted(gone), sorted(changed)


def refuse_other_rows(account: Path, files: Sequence[Path] | None = None) -> None:
    """Refuse files of rows that are no more those that an account vouches for. They are read whole, every time.

    account: a JSON file whose `digests` hold their SHA-256 by name. files: those that are looked at; None for all
    `.jsonl` that it names, in its folder.

    Raises VlmflowError with the files.
    """
    digests = read_json(account)["digests"]
    if files is None:
        files = [account.parent / name for name in digests if name.endswith(".jsonl")]
    differ = [file for file in files if not file.is_file() or sha256_of(file) != digests[file.name]]
    if differ:
        folder = differ[0].parent
        raise VlmflowError(
            f"{', '.join(map(str, differ))}: these are not the rows that {account} vouches for",
            f"remove {folder} and run the same command again: it is made anew",
        )


def look(folder: Path, digests: Mapping[str, str]) -> Record:
    """Give how files look that were just read, or written, with these digests."""
    return {name: _looks(os.stat(folder / name), sha256) for name, sha256 in digests.items()}


def remember(record: str, files: Record) -> None:
    """Add files to a record. One that cannot be written, or that another stage writes too, only has them read again."""
    place = _place_of(record)
    if place is None:
        return
    try:
        with whole_file(place) as file:
            file.write(msgspec.json.encode(_read(place) | files))
    except (OSError, VlmflowError):
        return


def _place_of(record: str) -> Path | None:
    folder = os.environ.get(RECORDS)
    return Path(folder) / f"{record}.json" if folder else None


def _read(place: Path | None) -> Record:
    try:
        return msgspec.json.decode(place.read_bytes(), type=Record) if place else {}
    except (OSError, ValueError):
        return {}


def _looks(found: os.stat_result, sha256: str) -> Seen:
    return Seen(found.st_size, found.st_mtime_ns, found.st_ino, sha256)


def _is_settled(look: Seen) -> bool:
    return look.mtime < time.time_ns() - CLOCK_NS


def _hash(what: str, folder: Path, names: list[str]) -> Record:
    """Read files, and give what they look like by name; those that are gone meanwhile are left out."""
    if not names:
        return {}
    with (
        Progress(f"comparing {what} with their digests", len(names), what) as progress,
        ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool,
    ):
        found: Record = {}
        for name, one in zip(names, pool.map(lambda name: _seen(folder / name), names), strict=True):
            progress.advance()
            if one is not None:
                found[name] = one
        return found


def _seen(file: Path) -> Seen | None:
    try:
        with file.open("rb") as opened:
            before = os.fstat(opened.fileno())
            return _looks(before, file_digest(opened, "sha256").hexdigest())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def digests_of(folder: Path, names: list[str]) -> dict[str, str]:
    """Give the SHA-256 of some files of a folder by name, to be recorded for the stages that read them."""
    return {name: sha256_of(folder / name) for name in names}
