"""Receives a packed checkout: runs in the controller, given as text to its Python; standard library alone.

usage: unpack.py FOLDER < TAR
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path


def unpack(folder: Path) -> None:
    """Make `folder` the checkout that standard input holds; files that git does not know (of a run) stay.

    All of it arrives beside first: a stream that is cut off changes nothing.
    """
    new = folder / ".arriving"
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # Python 3.11.2, which Debian 12 has, knows no filters yet: https://docs.python.org/3/library/tarfile.html
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(new)  # noqa: S202
    subprocess.run(["git", "add", "--all"], cwd=new, check=True)
    for name in _known(folder) - _known(new):
        (folder / name).unlink(missing_ok=True)
    for name in _known(new):
        _clear_the_way(folder, name)
        (new / name).replace(folder / name)
    shutil.rmtree(folder / ".git", ignore_errors=True)
    (new / ".git").rename(folder / ".git")
    shutil.rmtree(new)


def _known(folder: Path) -> set[str]:
    """Name the files that git knows; none where there is no checkout, or half of one."""
    own = ["git", f"--git-dir={folder / '.git'}", f"--work-tree={folder}", "ls-files", "-z"]
    listed = subprocess.run(own, check=False, capture_output=True, text=True)
    return set(filter(None, listed.stdout.split("\0")))


def _clear_the_way(folder: Path, name: str) -> None:
    """Make room for a file: a folder of its name goes, and a file in the place of one of its folders."""
    for above in reversed(Path(name).parents):
        if (folder / above).is_file() or (folder / above).is_symlink():
            (folder / above).unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        shutil.rmtree(folder / name)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
