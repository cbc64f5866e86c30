"""Turns what `folder_trials.py` found in a folder into a finding."""

from collections.abc import Mapping
from typing import Literal

from vlmflow.remote.findings import Finding

TRIALS: dict[str, tuple[Literal["warn", "fail"], str, str]] = {
    "write": ("fail", "cannot write", ""),
    "flock": (
        "fail",
        "cannot lock files",
        "two trainers could write one run folder: mount Lustre with -o flock, NFS without nolock; FUSE file systems "
        "without locks do not work",
    ),
    "rename": ("fail", "cannot rename a folder", "targets get their names by renaming: use a POSIX file system"),
    "symlink": ("fail", "cannot make links", "the picture store consists of links: use a POSIX file system"),
    "hard_link": ("warn", "cannot make hard links", "nothing, if the disk has room: merged weights are copied instead"),
}
"""By trial: the state if it fails, what that means, and what to do."""


def check_folder(what: str, wrong: Mapping[str, str], user: int, unwritable: str) -> Finding:
    """Judge one folder. wrong: the errors by trial. user: the number of who tried. unwritable: what to do then."""
    for trial, (state, words, step) in TRIALS.items():
        if trial in wrong:
            return Finding(what, state, f"user {user} {words}: {wrong[trial]}", step or unwritable)
    return Finding(what, "ok", f"writable as user {user}, with locks, links and renamed folders")
