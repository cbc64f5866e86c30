"""Files over one stream, each with its digest, resumed where an earlier stream broke.

Runs on both sides: imported here, and given as text to the controller's Python; standard library alone.

usage: file_stream.py send PATH      what is at PATH goes to standard output
       file_stream.py receive PATH   what comes from standard input is put at PATH

The receiver begins: a line of JSON with the bytes that it has of each file, finished or not (`NAME.part`). The sender
answers with the number of files and bytes, and for each file with a line of JSON (name, size, mtime in ns, offset), the
bytes from that offset on, and a line with the SHA-256 of the whole file. It ends with an empty line. The receiver
compares every digest, and gives a file its name then; one that is another is sent anew by the next stream.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

BLOCK = 1 << 20
LONGEST_LINE = 64 << 20
"""Bytes of a line of JSON: that of the receiver names every file."""

PART = ".part"
SINGLE = ""
"""The name of a file that is sent by itself."""


class Broken(Exception):
    """The stream ended early, or holds what is no such stream."""


class Refused(Exception):
    """What is to be copied must not be, or is not there."""


def files_at(path: Path) -> dict[str, Path]:
    """Give the regular files at a path by their names in it; a file by itself has the name "".

    A link is followed where it stays within the folder.

    Raises Refused where there is nothing, or a link leads out: a job's pod could have made it.
    """
    if path.is_file():
        return {SINGLE: path}
    if not path.is_dir():
        raise Refused(f"{path} is not there")
    root = path.resolve()
    found = {}
    for folder, folders, names in os.walk(root):
        for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
            file = Path(folder, name)
            if file.is_symlink() and not file.resolve().is_relative_to(root):
                raise Refused(f"{file} is a link to {file.resolve()}, which is outside of {path}")
            if not file.is_file():
                raise Refused(f"{file} is neither a file nor a folder")
            if name != ".snakemake_timestamp":
                found[file.relative_to(root).as_posix()] = file
    return dict(sorted(found.items()))


def sizes_at(path: Path) -> dict[str, int]:
    """Give the bytes that are at a path of each file, by name; those of an unfinished one go by its name to be."""
    if path.is_file() or (not path.exists() and _part(path).is_file()):
        return {SINGLE: (path if path.is_file() else _part(path)).stat().st_size}
    root = _root(path)
    found = [place for place in root.rglob("*") if place.is_file() and not place.is_symlink()]
    found.sort(key=lambda place: place.suffix != PART)  # of a file that is there twice, the finished one counts
    return {place.relative_to(root).as_posix().removesuffix(PART): place.stat().st_size for place in found}


def send(path: Path, there: dict[str, int], stream: BinaryIO) -> None:
    """Send what is at a path. there: the bytes that the receiver has, by name.

    Raises Refused as `files_at`, and where a file shrinks meanwhile.
    """
    files = files_at(path)
    say(stream, {"files": len(files), "bytes": sum(file.stat().st_size for file in files.values())})
    for name, file in files.items():
        with file.open("rb") as content:
            stat = os.fstat(content.fileno())
            offset = there.get(name, 0) if there.get(name, 0) <= stat.st_size else 0
            say(stream, {"name": name, "size": stat.st_size, "mtime": stat.st_mtime_ns, "offset": offset})
            digest = hashlib.sha256()
            for block in _blocks(content, offset, Refused):
                digest.update(block)
            for block in _blocks(content, stat.st_size - offset, Refused):
                digest.update(block)
                stream.write(block)
        say(stream, {"sha256": digest.hexdigest()})
    stream.write(b"\n")
    stream.flush()


def receive(path: Path, stream: BinaryIO, seen: Callable[[int, int], None]) -> int:
    """Put what comes at a path, each file whole or not at all; a new folder takes its name when all of it is there.

    seen: is told of every block: the bytes done so far, and of all.

    Gives the number of files whose bytes were not those that were sent: to be sent anew. Raises Broken where the stream
    ends early, and Refused for a name that leads out of the path.
    """
    head = heard(stream)
    root = _root(path)
    done = wrong = files = 0
    while (about := heard(stream)) is not None:
        place = inside(root, about["name"]) if about["name"] != SINGLE else path
        wrong += not _receive_one(stream, place, about, lambda count, before=done: seen(before + count, head["bytes"]))
        done += about["size"]
        files += 1
    if files != head["files"]:
        raise Broken(f"{files} of {head['files']} files came")
    if not wrong and root != path and root.is_dir():
        root.rename(path)
    return wrong


def _root(path: Path) -> Path:
    """Give the folder that files arrive in: one that is there, or else one beside it until it is whole."""
    return path if path.exists() else _part(path)


def _receive_one(stream: BinaryIO, place: Path, about: dict[str, Any], seen: Callable[[int], None]) -> bool:
    """Take one file. Tells whether its digest is right: then it has its name; else it is gone."""
    part, count, digest = _part(place), about["offset"], hashlib.sha256()
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = place.is_file() and not place.is_symlink() and place.stat().st_size == count == about["size"]
    if not whole and count and not part.exists():
        shutil.copyfile(place, part, follow_symlinks=False)  # the file has grown where it comes from
    mine = place if whole else part
    with os.fdopen(os.open(mine, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as content:
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
    """Give the place of a name in a folder. Raises Refused for one that leads elsewhere, a link on the way included."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or not parts:
        raise Refused(f"{name!r} is no name of a file in a folder")
    place = folder
    for part in parts[:-1]:
        place /= part
        if place.is_symlink():
            raise Refused(f"{place} is a link: nothing is written through it")
    return place / parts[-1]


def refuse_links_to(path: Path) -> None:
    """Refuse a path that leads over a link: a job's pod could have made it, and what it leads to is not a job's."""
    for place in [path, *path.parents]:
        if place.is_symlink():
            raise Refused(f"{place} is a link to {place.readlink()}")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _blocks(stream: BinaryIO, count: int, failure: type[Exception]) -> Iterator[bytes]:
    while count:
        block = stream.read(min(count, BLOCK))
        if not block:
            raise failure(f"{count} bytes are missing at the end")
        count -= len(block)
        yield block


def say(stream: BinaryIO, value: Any) -> None:
    """Write a line of JSON."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def heard(stream: BinaryIO) -> Any:
    """Give the JSON of the next line; None for the empty line at the end. Raises Broken where there is none."""
    line = stream.readline(LONGEST_LINE)
    if line == b"\n":
        return None
    try:
        if line.endswith(b"\n"):
            return json.loads(line)
    except ValueError:
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
