"""Writes files and folders that get their names only when they are whole; reads, compares and removes files."""

import fcntl
import filecmp
import hashlib
import io
import json
import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vlmflow.core.errors import PassingError, VlmflowError

logger = logging.getLogger(__name__)

UNFINISHED = ".part"
"""Suffix of a file or folder that is still being written; nothing reads such a name as a result."""

FOLDER_MARK = ".snakemake_timestamp"
"""The file with which Snakemake marks a folder that a rule made."""

PATIENCE = 10.0
"""Seconds to wait for another process that writes the same name."""

BUFFER = 1 << 20
"""Bytes read or written at a time; rows are a few KB each."""


LFS = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""


def user_cache() -> Path:
    """Return the folder for what this user's next calls can use again (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmflow"


def unfinished(path: Path) -> Path:
    """Return the name of `path` until it is whole; it is in the same folder, so that a rename suffices."""
    return path.with_name(path.name + UNFINISHED)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to an OSError that has none, as one from writing to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _NamedFile(io.FileIO):
    """A file opened by its descriptor, whose write errors have its name."""

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "w")
        self._path = path

    def write(self, content: Any) -> int:
        with naming(self._path):
            return super().write(content)


@contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open `path` for writing; it gets its name, synced to disk, only if the block ends without an error.

    mode: "wb", or "w" for text.

    Raises PassingError if another process keeps writing it.
    """
    part = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _own(part, lambda: os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    content = io.BufferedWriter(_NamedFile(descriptor, part), BUFFER)
    with content if mode == "wb" else io.TextIOWrapper(content, encoding="utf-8") as file:
        file.truncate(0)
        yield file
        file.flush()
        with naming(part):
            os.fsync(descriptor)
    part.replace(path)


@contextmanager
def whole_folder(path: Path, resumed: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `path`, synced to disk, only if the block ends without an error.

    resumed: whether it still has the files of an earlier, killed attempt, which otherwise are removed first.
    An existing `path` is replaced; if it has the same files, it keeps its times, so that nothing made from it looks
    stale.

    Raises PassingError if another process keeps writing it.
    """
    part = unfinished(path)

    def make_and_open() -> int:
        part.mkdir(parents=True, exist_ok=True)
        return os.open(part, os.O_RDONLY | os.O_CLOEXEC)

    descriptor = _own(part, make_and_open)
    try:
        for left in () if resumed else part.iterdir():
            remove(left)
        yield part
        for entry in [part, *part.rglob("*")]:
            if not entry.is_symlink():
                sync(entry)
        if path.is_dir() and _same_files(part, path):
            remove(part)
        else:
            remove(path)
            part.rename(path)
    finally:
        os.close(descriptor)


def _own(part: Path, open_it: Callable[[], int]) -> int:
    """Open an unfinished file or folder for this process alone; return the descriptor, which holds the lock.

    Two writers of one name would mix their bytes. A killed writer's lock ends with it and with its forked children, a
    moment later. If the file was renamed or removed meanwhile, it is opened again.
    """
    give_up = time.monotonic() + PATIENCE
    while True:
        descriptor = open_it()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if part.exists() and part.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(descriptor)
                raise PassingError(
                    f"{part}: another process is writing it",
                    "wait for it to end, or stop it; then run the same command again",
                ) from None
        os.close(descriptor)
        time.sleep(0.1)


@contextmanager
def locked(lock: Path, told: str) -> Iterator[None]:
    """Hold a lock file. If another process holds it, log `told`, and wait."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info(told)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _same_files(first: Path, other: Path) -> bool:
    names = [sorted(entry.relative_to(folder) for entry in folder.rglob("*")) for folder in (first, other)]
    return names[0] == names[1] and all(_same(first / name, other / name) for name in names[0])


def _same(first: Path, other: Path) -> bool:
    # Compare the links: a target may be too large to read.
    if first.is_symlink() or other.is_symlink():
        return first.is_symlink() and other.is_symlink() and first.readlink() == other.readlink()
    return first.is_dir() or first.samefile(other) or filecmp.cmp(first, other, shallow=False)


def lies_within(name: str) -> bool:
    """Return whether a name from outside is that of a file in a folder, in its one form: `a/b.json`."""
    path = PurePosixPath(name)
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in name):
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name


def sync(path: Path) -> None:
    """Flush to disk what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Give a file a second name, with a hard link where the file system can make one."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; keys keep their order."""
    with whole_file(path) as file:
        file.write(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return `value` as `write_json` writes it."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read one JSON file.

    Raises VlmflowError with the file's name if it is missing, no file (a pipe would be waited for), or not JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("is not a file")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise VlmflowError(f"{path}: {error}", f"remove {target_of(path)} and run the same command again") from None


def target_of(path: Path) -> Path:
    """Return the target that contains a file: its folder if a rule made the folder, else the file itself.

    If only the file is removed, Snakemake does not make such a folder again.
    """
    return path.parent if (path.parent / FOLDER_MARK).exists() else path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def records_digest(path: Path) -> str:
    """Return a digest of the names, sizes and CRC-32 of a zip archive's records, as torch.save writes them.

    Only the list at its end is read, in no time; `ZipFile.testzip` compares the records with it.
    """
    with zipfile.ZipFile(path) as archive:
        listed = [(record.filename, record.file_size, record.CRC) for record in archive.infolist()]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def count_lines(path: Path) -> int:
    """Return the number of newlines in a file, as fast as it can be read."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(partial(file.read, BUFFER), b""))


def require_free_disk(folder: Path, needed: int, purpose: str) -> None:
    """Refuse work that cannot finish: `needed` bytes must be free on the disk where `folder` is, or will be.

    purpose: what needs them, for the message.

    Raises PassingError with the missing amount.
    """
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise PassingError(
            f"{existing}: {purpose} needs {needed / 1e9:.2f} GB, only {free / 1e9:.2f} GB is free",
            f"free {(needed - free) / 1e9:.2f} GB there, or take a larger disk (config: stores; for work/ and merged/ "
            "the working directory: --directory)",
        )
