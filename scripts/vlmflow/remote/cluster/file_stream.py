"""Sends files over one stream, each with its digest; resumes where an earlier stream broke.

Runs on both sides: imported here, and as text in the controller's Python; uses only the standard library.

usage: file_stream.py send PATH      send PATH to standard output
       file_stream.py receive PATH   write what arrives on standard input to PATH

The receiver starts with a line of JSON: the bytes that it has of each file, finished or not (`NAME.part`). The sender
answers with the number of files and bytes. For each file it then sends a line of JSON (name, size, mtime in ns,
offset), the bytes from that offset on, and a line with the SHA-256 of the whole file; at the end an empty line. The
receiver compares every digest before a file gets its name; after a mismatch, the next stream sends the file again.

Jobs write to the volumes, and the controller's other mounts hold a token and what it executes. So reading follows no
link out of the folder, and writing follows no link at all.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

BLOCK = 1 << 20
LONGEST_LINE = 64 << 20
"""The most bytes of a line of JSON: the receiver's names every file."""

PART = ".part"
SINGLE = ""
"""The name of a file that is sent without a folder."""

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: opening a named pipe would block forever."""


class Broken(Exception):
    """The stream ended early or has another form."""


class Refused(Exception):
    """The path may not be copied, or does not exist."""


def files_at(path: Path) -> dict[str, Path]:
    """Return the regular files below a path by their names in it; a single file has the name "".

    path: absolute and without links. Links below it are followed within the folder.

    Raises Refused if it does not exist, or a link leads out of it.
    """
    if path.is_file():
        return {SINGLE: path}
    if not path.is_dir():
        raise Refused(f"{path} does not exist")
    root, found = path, {}
    for folder, folders, names in os.walk(root):
        for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
            file = Path(folder, name)
            real = Path(os.path.realpath(file)) if file.is_symlink() else file  # resolve() raises for a link to itself
            if not real.is_relative_to(root):
                raise Refused(f"{file} is a link to {real}, outside of {path}")
            if not real.is_file():
                raise Refused(f"{file} is neither a file nor a folder")
            if name != ".snakemake_timestamp":
                found[file.relative_to(root).as_posix()] = real
    return dict(sorted(found.items()))


def sizes_at(path: Path) -> dict[str, int]:
    """Return the existing bytes of each file at a path, by name; an unfinished file has its final name here."""
    if path.is_file() or (not path.exists() and _part(path).is_file()):
        return {SINGLE: (path if path.is_file() else _part(path)).stat().st_size}
    root = _root(path)
    found = [place for place in root.rglob("*") if place.is_file() and not place.is_symlink()]
    found.sort(key=lambda place: place.suffix != PART)  # if both exist, the finished file counts
    return {place.relative_to(root).as_posix().removesuffix(PART): place.stat().st_size for place in found}


class Sink(Protocol):
    """What takes a stream."""

    def write(self, block: bytes, /) -> object: ...  # noqa: D102
    def flush(self) -> object: ...  # noqa: D102


def send(path: Path, there: dict[str, int], stream: Sink) -> None:
    """Send the files at a path. there: the bytes that the receiver has, by name.

    Raises Refused as `files_at` does, and if a file shrinks meanwhile.
    """
    files = files_at(path)
    say(stream, {"files": len(files), "bytes": sum(file.stat().st_size for file in files.values())})
    for name, file in files.items():
        with opened(file) as content:
            about = os.fstat(content.fileno())
            offset = there.get(name, 0) if there.get(name, 0) <= about.st_size else 0
            say(stream, {"name": name, "size": about.st_size, "mtime": about.st_mtime_ns, "offset": offset})
            digest = hashlib.sha256()
            for block in _blocks(content, offset, Refused):
                digest.update(block)
            for block in _blocks(content, about.st_size - offset, Refused):
                digest.update(block)
                stream.write(block)
        say(stream, {"sha256": digest.hexdigest()})
    stream.write(b"\n")
    stream.flush()


def receive(path: Path, stream: IO[bytes], seen: Callable[[int, int], None]) -> int:
    """Write what arrives to a path, each file completely or not at all; a new folder gets its name when it is complete.

    seen: called after every block with the bytes done so far, and with the total.

    Returns the number of files whose digest did not match, which must be sent again. Raises Broken if the stream ends
    early, and Refused for a name that leads out of the path.
    """
    head = heard(stream)
    root = _root(path)
    done = wrong = files = 0
    while (about := heard(stream)) is not None:
        place = inside(root, about["name"]) if about["name"] != SINGLE else path

        def seen_of_file(count: int, before: int = done) -> None:
            seen(before + count, head["bytes"])

        with reached(place, make=True) as there:
            wrong += not _receive_one(stream, there, about, seen_of_file)
        done += about["size"]
        files += 1
    if files != head["files"]:
        raise Broken(f"{files} of {head['files']} files arrived")
    if not wrong and root != path and root.is_dir():
        with reached(path) as there:
            _part(there).rename(there)
    return wrong


def _root(path: Path) -> Path:
    """Return the folder that files arrive in: the existing one, or else one beside it until all files are there."""
    return path if path.exists() else _part(path)


def _receive_one(stream: IO[bytes], place: Path, about: dict[str, Any], seen: Callable[[int], None]) -> bool:
    """Receive one file, and return whether its digest is right: then it has its name; otherwise it is deleted.

    place: from `reached`.
    """
    part, count, digest = _part(place), about["offset"], hashlib.sha256()
    whole = place.is_file() and not place.is_symlink() and place.stat().st_size == count == about["size"]
    if not whole and count and not os.path.lexists(part):  # the sender's file has grown
        with (
            os.fdopen(os.open(place, os.O_RDONLY | FILE), "rb") as old,
            os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o644), "wb") as new,
        ):
            shutil.copyfileobj(old, new)
    mine = place if whole else part
    with os.fdopen(os.open(mine, os.O_RDWR | os.O_CREAT | FILE, 0o644), "r+b") as content:
        for block in _blocks(content, count, Broken):
            digest.update(block)
        content.truncate(count)
        for block in _blocks(stream, about["size"] - count, Broken):
            digest.update(block)
            content.write(block)
            count += len(block)
            seen(count)
        content.flush()
        os.fsync(content.fileno())
    if heard(stream) != {"sha256": digest.hexdigest()}:
        mine.unlink()
        return False
    os.utime(mine, ns=(about["mtime"], about["mtime"]))
    mine.replace(place)
    return True


def inside(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder. Raises Refused for a name that leads elsewhere."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or not parts:
        raise Refused(f"{name!r} is not the name of a file in a folder")
    return folder / name


@contextmanager
def reached(place: Path, make: bool = False) -> Iterator[Path]:
    """Yield another path to an absolute one during the block; it leads there whatever folder above is renamed.

    Like remote.storage.pod_folder, which cannot be imported in the controller. The last name may be a link: the caller
    must not follow it. make: whether to make missing folders above it.

    Raises Refused if a folder above it is a link, or the block meets one.
    """
    way, descriptor = Path("/"), os.open("/", FOLDER)
    try:
        for name in place.parts[1:-1]:
            way /= name
            inner = _folder_in(descriptor, name, make)
            os.close(descriptor)
            descriptor = inner
        way = place
        yield Path(f"/proc/self/fd/{descriptor}", place.name)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            way = _part(way) if str(error.filename).endswith(PART) and way.suffix != PART else way
            raise Refused(f"{way} is a link or not the expected kind of file; it is not followed") from None
        error.filename, error.filename2 = str(way), None
        raise
    finally:
        os.close(descriptor)


def _folder_in(descriptor: int, name: str, make: bool) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=descriptor)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another process made it at the same moment
        os.mkdir(name, dir_fd=descriptor)
    return os.open(name, FOLDER, dir_fd=descriptor)


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a regular file during the block. Raises Refused if it is something else, or its path has a link."""
    with reached(file) as place:
        content = os.fdopen(os.open(place, os.O_RDONLY | FILE), "rb")
    with content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise Refused(f"{file} is not a regular file")
        yield content


def refuse_links_to(path: Path) -> None:
    """Refuse a path with a link, before any message shows where it leads."""
    for place in [path, *path.parents]:
        if place.is_symlink():
            raise Refused(f"{place} is a link to {place.readlink()}")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _blocks(stream: IO[bytes], count: int, failure: type[Exception]) -> Iterator[bytes]:
    while count:
        block = stream.read(min(count, BLOCK))
        if not block:
            raise failure(f"{count} bytes are missing at the end")
        count -= len(block)
        yield block


def say(stream: Sink, value: Any) -> None:
    """Write a line of JSON."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def heard(stream: IO[bytes]) -> Any:
    """Return the JSON of the next line; None for the empty line at the end. Raises Broken if there is none."""
    line = stream.readline(LONGEST_LINE)
    if line == b"\n":
        return None
    try:
        if line.endswith(b"\n"):
            return json.loads(line)
    except (ValueError, RecursionError):
        pass
    raise Broken(f"the stream broke off: {line[:200]!r}" if line else "the stream broke off")


if __name__ == "__main__":
    place = Path(sys.argv[2])
    try:
        refuse_links_to(place)
        if sys.argv[1] == "send":
            send(place, heard(sys.stdin.buffer), sys.stdout.buffer)
        else:
            say(sys.stdout.buffer, sizes_at(place))
            say(sys.stdout.buffer, {"wrong": receive(place, sys.stdin.buffer, lambda done, total: None)})
    except (Refused, OSError) as error:
        sys.exit(f"refused: {error}")
    except Broken as error:
        sys.exit(str(error))
