"""Receives a packed checkout: runs in the controller, given as text to its Python; standard library alone.

usage: unpack.py FOLDER < TAR
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path


def unpack(folder: Path) -> None:
    """Make `folder` the checkout that standard input holds; files that git does not know (of a run) stay."""
    before = _known(folder) if (folder / ".git").is_dir() else set()
    shutil.rmtree(folder / ".git", ignore_errors=True)
    received = set()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # Python 3.11.2, which Debian 12 has, knows no filters yet: https://docs.python.org/3/library/tarfile.html
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        for member in archive:
            archive.extract(member, folder)
            received.add(member.name)
    for name in before - received:
        (folder / name).unlink(missing_ok=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


def _known(folder: Path) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, check=True, capture_output=True, text=True)
    return set(filter(None, listed.stdout.split("\0")))


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
