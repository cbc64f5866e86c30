"""Receives a packed checkout: runs as text in the controller's Python; uses only the standard library.

usage: unpack.py FOLDER < TAR
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path


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
    for name in _known(folder) - _known(new):
        (folder / name).unlink(missing_ok=True)
    for name in _known(new):
        _clear_the_way(folder, name)
        (new / name).replace(folder / name)
    shutil.rmtree(folder / ".git", ignore_errors=True)
    (new / ".git").rename(folder / ".git")
    shutil.rmtree(new)


def _known(folder: Path) -> set[str]:
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
    unpack(Path(sys.argv[1]))
