"""Packs the checkout for the controller: its last commit, and the files as they are."""

import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from vlmflow.core.errors import VlmflowError


def pack(checkout: Path, stream: IO[bytes]) -> int:
    """Write a tar of a git checkout: every file that git does not ignore, and a .git with only the last commit.

    Snakemake asks git which files belong to the workflow, and provenance names the commit. Returns the number of files.

    Raises VlmflowError if the folder is not a git checkout with a commit.
    """
    names = files_of(checkout)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=stream, mode="w|") as archive:
        # From a local path git would hard-link everything; from an address it copies one commit.
        _git(checkout, "clone", "--quiet", "--no-checkout", "--depth=1", checkout.resolve().as_uri(), folder)
        archive.add(Path(folder, ".git"), ".git", filter=_nobodys)
        for name in names:
            archive.add(checkout / name, name, recursive=False, filter=_nobodys)
    return len(names)


def files_of(checkout: Path) -> list[str]:
    """Return the existing files of the checkout that git tracks or would add, sorted."""
    listed = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted(name for name in listed.split("\0") if name and (checkout / name).is_file())


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _git(checkout: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise VlmflowError(f"{checkout}: {ended.stderr.strip()}", "work in a git clone that has a commit")
    return ended.stdout
