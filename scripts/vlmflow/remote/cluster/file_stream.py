"""Sends files over one stream, each with its digest, and resumes where an earlier stream broke; unpacks a checkout.

Runs on both sides: imported here, and as text in the controller's Python; uses only the standard library.

usage: file_stream.py send PATH            send PATH to standard output
       file_stream.py receive PATH         write what arrives on standard input to PATH
       file_stream.py unpack FOLDER <TAR   replace the checkout in FOLDER

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
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

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
    files = {}
    for folder, folders, names in os.walk(path):
        for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
            file = Path(folder, name)
            # `resolve` raises for a link to itself.
            real = Path(os.path.realpath(file)) if file.is_symlink() else file
            if not real.is_relative_to(path):
                raise Refused(f"{file} is a link to {real}, outside of {path}")
            if not real.is_file():
                raise Refused(f"{file} is neither a file nor a folder")
            if name != ".snakemake_timestamp":
                files[file.relative_to(path).as_posix()] = real
    return dict(sorted(files.items()))


def sizes_at(path: Path) -> dict[str, int]:
    """Return the existing bytes of each file at a path, by name; an unfinished file has its final name here."""
    if path.is_file() or (not path.exists() and _part(path).is_file()):
        return {SINGLE: (path if path.is_file() else _part(path)).stat().st_size}
    root = _root(path)
    files = [file for file in root.rglob("*") if file.is_file() and not file.is_symlink()]
    files.sort(key=lambda file: file.suffix != PART)  # if both exist, the finished file counts
    return {file.relative_to(root).as_posix().removesuffix(PART): file.stat().st_size for file in files}


def send(path: Path, there: dict[str, int], stream: IO[bytes], seen: Callable[[int], object] = bool) -> None:
    """Send the files at a path. there: the bytes that the receiver has, by name. seen: called with a block's bytes.

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
                seen(len(block))
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
        file = inside(root, about["name"]) if about["name"] != SINGLE else path

        def seen_of_file(count: int, before: int = done) -> None:
            seen(before + count, head["bytes"])

        with reached(file, make=True) as target:
            wrong += not _receive_file(stream, target, about, seen_of_file)
        done += about["size"]
        files += 1
    if files != head["files"]:
        raise Broken(f"{files} of {head['files']} files arrived")
    if not wrong and root != path and root.is_dir():
        with reached(path) as target:
            _part(target).rename(target)
    return wrong


def _root(path: Path) -> Path:
    """Return the folder that files arrive in: the existing one, or else one beside it until all files are there."""
    return path if path.exists() else _part(path)


def _receive_file(stream: IO[bytes], target: Path, about: dict[str, Any], seen: Callable[[int], None]) -> bool:
    """Receive one file, and return whether its digest is right: then it has its name; otherwise it is deleted.

    target: from `reached`.
    """
    part, count, digest = _part(target), about["offset"], hashlib.sha256()
    whole = target.is_file() and not target.is_symlink() and target.stat().st_size == count == about["size"]
    if not whole and count and not os.path.lexists(part):  # the sender's file has grown
        with (
            os.fdopen(os.open(target, os.O_RDONLY | FILE), "rb") as old,
            os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o644), "wb") as new,
        ):
            shutil.copyfileobj(old, new)
    mine = target if whole else part
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
    mine.replace(target)
    return True


def inside(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder. Raises Refused for a name that leads elsewhere."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or not parts:
        raise Refused(f"{name!r} is not the name of a file in a folder")
    return folder / name


@contextmanager
def opened_folder(folder: Path, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder during the block, for calls that take a `dir_fd`.

    Each folder of its path is opened relative to the one before it. Calls relative to the open folder cannot be
    redirected, whatever is renamed meanwhile. Linux only: `reached` uses /proc.

    folder: absolute. make: whether to make it, and folders above it, if they are missing.

    Raises OSError with the path of the first that cannot be opened: ENOTDIR for a link or a file.
    """
    path, descriptor = Path("/"), os.open("/", FOLDER)
    try:
        for name in folder.parts[1:]:
            path /= name
            try:
                inner = _folder_in(descriptor, name, make)
            except OSError as error:
                error.filename = str(path)
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
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
def reached(path: Path, make: bool = False) -> Iterator[Path]:
    """Yield another path to an absolute one during the block; it leads there whatever folder above is renamed.

    The last name may be a link: the caller must not follow it. make: whether to make missing folders above it.

    Raises Refused if a folder above it is a link, or the block meets one.
    """
    way = ""
    try:
        with opened_folder(path.parent, make) as descriptor:
            way = f"/proc/self/fd/{descriptor}"
            yield Path(way, path.name)
    except OSError as error:
        failed = Path(str(error.filename))
        shown = path.with_name(failed.name) if str(failed.parent) == way else path if way else failed
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Refused(f"{shown} is a link or not the expected kind of file; it is not followed") from None
        error.filename, error.filename2 = str(shown), None
        raise


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a regular file during the block. Raises Refused if it is something else, or its path has a link."""
    with reached(file) as way:
        content = os.fdopen(os.open(way, os.O_RDONLY | FILE), "rb")
    with content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise Refused(f"{file} is not a regular file")
        yield content


def refuse_links_to(path: Path) -> None:
    """Refuse a path with a link, before any message shows where it leads."""
    for part in [path, *path.parents]:
        if part.is_symlink():
            raise Refused(f"{part} is a link to {part.readlink()}")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _blocks(stream: IO[bytes], count: int, failure: type[Exception]) -> Iterator[bytes]:
    while count:
        block = stream.read(min(count, BLOCK))
        if not block:
            raise failure(f"{count} bytes are missing at the end")
        count -= len(block)
        yield block


def say(stream: IO[bytes], value: Any) -> None:
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


def unpack(folder: Path) -> None:
    """Replace `folder` by the checkout on standard input; files that git does not track (of a run) stay.

    The checkout is unpacked beside it first: a stream that breaks changes nothing.
    """
    new = folder / ".arriving"
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # Python 3.11.2 of Debian 12 has no filters yet: https://docs.python.org/3/library/tarfile.html
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(new)  # noqa: S202
    subprocess.run(["git", "add", "--all"], cwd=new, check=True)
    for name in _tracked(folder) - _tracked(new):
        (folder / name).unlink(missing_ok=True)
    for name in _tracked(new):
        _clear_the_way(folder, name)
        (new / name).replace(folder / name)
    shutil.rmtree(folder / ".git", ignore_errors=True)
    (new / ".git").rename(folder / ".git")
    shutil.rmtree(new)


def _tracked(folder: Path) -> set[str]:
    """Return the files that git tracks; none if there is no checkout, or an incomplete one."""
    own = ["git", f"--git-dir={folder / '.git'}", f"--work-tree={folder}", "ls-files", "-z"]
    listed = subprocess.run(own, check=False, capture_output=True, text=True)
    return set(filter(None, listed.stdout.split("\0")))


def _clear_the_way(folder: Path, name: str) -> None:
    """Make room for a file: remove a folder of its name, and files in the place of its folders."""
    for above in reversed(Path(name).parents):
        if (folder / above).is_file() or (folder / above).is_symlink():
            (folder / above).unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        shutil.rmtree(folder / name)


if __name__ == "__main__":
    action, path = sys.argv[1], Path(sys.argv[2])
    if action == "unpack":
        unpack(path)
        sys.exit()
    try:
        refuse_links_to(path)
        if action == "send":
            send(path, heard(sys.stdin.buffer), sys.stdout.buffer)
        else:
            say(sys.stdout.buffer, sizes_at(path))
            say(sys.stdout.buffer, {"wrong": receive(path, sys.stdin.buffer, lambda done, total: None)})
    except (Refused, OSError) as error:
        sys.exit(f"refused: {error}")
    except Broken as error:
        sys.exit(str(error))
