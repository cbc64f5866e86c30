"""Accounts: the JSON files in which a stage records its work, and the digests in them by which others check it.

Each account is written and read by one type. It is in the folder of the code that writes the account: a
`msgspec.Struct`, whose fields are the file's keys, or a `dict` with a name of its own if the keys are names of files.
Paths are stored as texts.

A stage compares its input with the digests that an earlier stage recorded, and refuses any difference. To get a digest,
the whole file must be read. So a record holds the digest of each file with the size, mtime and inode that the file had
when it was read: while these are the same, the digest counts as the same. Records are in the stores, not among the
targets, which are the same bytes on every machine. If a record is missing or from another machine, the files are read
again.
"""

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, Self, TypeVar

import msgspec

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import read_json, sha256_of, target_of, whole_file, write_json
from vlmflow.core.progress import Progress, in_threads

T = TypeVar("T")


class OtherVersionError(VlmflowError):
    """An account lacks a field of its type, or the field has another type: another version may have written it."""


MAKE_AGAIN = "remove it and run the same command again"

MISSING = re.compile(r"Object missing required field `(.+)`")
"""msgspec's message for a missing key."""

Integrity = Literal["quick", "full"]

LEVEL = "VLMFLOW_INTEGRITY"
"""The environment variable with the configuration's `integrity`. It is no param of a rule: a changed value is no reason
to train again."""

RECORDS = "VLMFLOW_RECORDS"
"""The environment variable with the folder of the records; without it, every file is read."""

RECORDS_FOLDER = ".seen"
"""The name of that folder in `stores.pictures`."""

READERS = 8
"""Files that are read at a time, at most; hashlib releases the interpreter's lock."""

CLOCK_NS = 100_000_000
"""A file that changed within these nanoseconds is not recorded: it may change again in one tick of the disk's clock."""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors that mean that a file is missing; others (permissions, a failing disk) do not."""

NAMED = 5
"""Changed files that an error names, and missing files, at most."""


def write_account(path: Path, account: msgspec.Struct | dict[str, Any]) -> None:
    """Write an account as indented JSON, whole or not at all; keys are in the order of the type's fields."""
    write_json(path, msgspec.to_builtins(account, enc_hook=_as_text))


def read_account(path: Path, form: type[T]) -> T:
    """Read an account; keys that its type does not have are ignored.

    form: the type; also `list[str]` if the file is a plain list.

    Raises VlmflowError with the file if it is missing or not JSON; OtherVersionError with the file and the field if a
    field is missing or has another type.
    """
    try:
        return msgspec.convert(read_json(path), form, str_keys=True, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        # msgspec names the field last, or in backquotes; the message has it first ("train.kept is missing").
        fault, _, location = str(error).partition(" - at ")
        field = location.strip("`").removeprefix("$").removeprefix(".")
        if missing := MISSING.fullmatch(fault):
            fault = f"{field}{'.' if field else ''}{missing[1]} is missing"
        elif field:
            fault = f"{field}: {fault}"
        raise OtherVersionError(
            f"{path}: {fault}",
            f"another version of vlmflow may have written it: remove {target_of(path)} and run the same command again",
        ) from None


def read_lines(file: Path, form: type[T], next_step: str = MAKE_AGAIN) -> Iterator[T]:
    """Yield the lines of a file of JSON lines, each decoded as `form`, so that memory does not grow with them.

    Raises VlmflowError if the file is missing, or with the line if one is not of this form.
    """
    decoder = msgspec.json.Decoder(form)
    try:
        lines = file.open("rb")
    except OSError as error:
        raise VlmflowError(f"{file}: {error.strerror}", next_step) from None
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                decoded = decoder.decode(line)
            except ValueError as error:
                raise VlmflowError(f"{file}, line {number}: {error}", next_step) from None
            yield decoded


def _as_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no account can hold a {type(value).__name__}")


def _from_text(form: type[Any], value: Any) -> Any:
    if form is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `{form.__name__}`, got `{type(value).__name__}`")


class Seen(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The state of a file when it was read, and its SHA-256. size: bytes. mtime: ns.

    ctime is left out: a new or removed hard link changes it too.
    """

    size: int
    mtime: int
    inode: int
    sha256: str

    @classmethod
    def of(cls, state: os.stat_result, sha256: str) -> Self:
        """Return the record of a file in this state."""
        return cls(state.st_size, state.st_mtime_ns, state.st_ino, sha256)


Record = dict[str, Seen]


def refuse_changed(label: str, folder: Path, digests: Mapping[str, str], record: str, next_step: str) -> None:
    """Refuse files that are missing, or differ from the digest that an earlier stage recorded.

    label: the files, as messages call them ("pictures"). digests: SHA-256 by name in `folder`.
    record: the name of their record, the same in every stage ("pictures/fire").
    next_step: what to do if some are missing or differ.

    Raises VlmflowError with their number and the first names; PassingError if a file cannot be read.
    """
    gone, changed = compare(label, folder, digests, record)
    faults = [
        f"{len(names):,} of {len(digests):,} {label} {fault}: {', '.join(names[:NAMED])}"
        for names, fault in ((changed, "have changed since they were checked"), (gone, "are missing"))
        if names
    ]
    if faults:
        raise VlmflowError(f"{folder}: {'; '.join(faults)}", next_step)


def compare(label: str, folder: Path, digests: Mapping[str, str], record: str) -> tuple[list[str], list[str]]:
    """Return the names of the missing files, and of those with another digest than expected, each list sorted.

    The parameters are those of `refuse_changed`. With `integrity: full` every file is read, with quick only those whose
    state differs from the record.

    Raises PassingError if a file cannot be read.
    """
    recorded = _recorded(_file_of(record))
    full = os.environ.get(LEVEL) == "full"
    gone: list[str] = []
    doubtful: list[str] = []
    for name, sha256 in digests.items():
        state = _state(folder / name)
        if state is None:
            gone.append(name)
        elif full or recorded.get(name) != Seen.of(state, sha256):
            doubtful.append(name)
    began = time.time_ns()
    read = read_files(f"comparing {label} with their digests", label, folder, doubtful)
    changed = [name for name in doubtful if name in read and read[name].sha256 != digests[name]]
    gone += [name for name in doubtful if name not in read]
    remember(record, {name: seen for name, seen in read.items() if seen.sha256 == digests[name]}, began)
    return sorted(gone), sorted(changed)


def read_files(work: str, unit: str, folder: Path, names: Sequence[str]) -> Record:
    """Read whole files; return their states and digests by name, without the missing ones.

    work, unit: for the progress.

    Raises PassingError if a file cannot be read.
    """
    if not names:
        return {}
    files: Record = {}
    with Progress(work, len(names), unit) as progress:

        def read(name: str) -> None:
            if (seen := _seen(folder / name)) is not None:
                files[name] = seen
            progress.advance()

        in_threads(names, read, min(READERS, len(os.sched_getaffinity(0))))
    return {name: files[name] for name in names if name in files}


class _Digests(msgspec.Struct):
    """The one key that all accounts of rows have: their own types are in folders that `core` must not import."""

    digests: dict[str, str]


class _DigestsByKind(msgspec.Struct):
    """The digests of an account that has files of several kinds."""

    digests: dict[str, dict[str, str]]


def refuse_other_rows(
    account: Path, files: Sequence[Path] | None = None, kind: str | None = None, advice: str | None = None
) -> None:
    """Refuse files of rows that are missing, or differ from the digests in an account. It reads them whole, every time.

    account: a JSON file whose `digests` are their SHA-256 by name. files: those to check; None for all `.jsonl` files
    that it names, in its folder. kind: the key in `digests` under which they are; None if there are no such keys.
    advice: what to do; None to make the folder of the files again.

    Raises VlmflowError with the files; PassingError if one cannot be read.
    """
    digests = read_account(account, _DigestsByKind).digests[kind] if kind else read_account(account, _Digests).digests
    if files is None:
        files = [account.parent / name for name in digests if name.endswith(".jsonl")]
    read = {file: _seen(file) for file in files}
    differ = [file for file, seen in read.items() if seen is None or seen.sha256 != digests[file.name]]
    if differ:
        folder = differ[0].parent
        raise VlmflowError(
            f"{', '.join(map(str, differ))}: {account} records other digests for these rows",
            advice or f"remove {folder} and run the same command again: the workflow makes it again",
        )


def remember(record: str, files: Record, began: int) -> None:
    """Add files to a record; if it cannot be written, or another stage writes it too, they are only read again later.

    began: when their reading began, in ns. Files that changed just before (CLOCK_NS) are left out: another change could
    fall into the same tick of the disk's clock.
    """
    path, known = _file_of(record), _recorded(_file_of(record))
    settled = {name: seen for name, seen in files.items() if seen.mtime < began - CLOCK_NS}
    if path and known | settled != known:
        with suppress(OSError, VlmflowError), whole_file(path) as file:
            file.write(msgspec.json.encode(known | settled))


def _file_of(record: str) -> Path | None:
    folder = os.environ.get(RECORDS)
    return Path(folder) / f"{record}.json" if folder else None


def _recorded(path: Path | None) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _state(file: Path) -> os.stat_result | None:
    """Return the state of a regular file, or None; reading a pipe would wait forever."""
    try:
        state = os.stat(file)
    except OSError as error:
        _refuse_unless_gone(file, error)
        return None
    return state if S_ISREG(state.st_mode) else None


def _seen(file: Path) -> Seen | None:
    """Read a file; return its digest and its state before the reading, or None if the file is missing."""
    if _state(file) is None:
        return None
    try:
        with file.open("rb") as opened:
            before = os.fstat(opened.fileno())
            return Seen.of(before, file_digest(opened, "sha256").hexdigest())
    except OSError as error:
        _refuse_unless_gone(file, error)
        return None


def _refuse_unless_gone(file: Path, error: OSError) -> None:
    if error.errno not in GONE:
        raise PassingError(
            f"{file}: {error.strerror}",
            "check its permissions and its disk, then run the same command again",
        ) from None


def digests_of(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the SHA-256 of some files of a folder by name, which accounts record for later stages."""
    return {name: sha256_of(folder / name) for name in names}
