"""Sets the tables of `make status`.

The doctor's findings, and how they are printed: as a table or JSON.

Turns what `folder_trials.py` found in a folder into a finding.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row. The columns are aligned, but for the last, of which each cell keeps its width."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


MARKS = {"ok": ("ok", "32"), "warn": ("note", "33"), "fail": ("FAIL", "31")}
"""The word of a state, and its colour (ANSI)."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    what: the thing that was checked.
    state: ok; warn if a run works without it; fail if not.
    found: what was found, for people.
    next_step: what to do about it; empty if ok.
    """

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    next_step: str = ""


def is_ready(checks: Iterable[Finding]) -> bool:
    """Return whether no finding prevents a run."""
    return all(check.state != "fail" for check in checks)


def as_line(check: Finding, colours: bool) -> str:
    """Format one finding for people, with its next step on a separate line. colours: use ANSI codes."""
    word, code = MARKS[check.state]
    mark = f"\x1b[{code}m{word:<5}\x1b[0m" if colours else f"{word:<5}"
    found = check.found.replace("\n", "\n" + " " * 27)
    step = f"\n{'':<27}what to do: {check.next_step}" if check.next_step else ""
    return f"{mark} {check.what:<20} {found}{step}"


def report(checks: Iterable[Finding], as_json_text: bool) -> int:
    """Print findings as they come, or JSON at the end; returns the exit code: 0 if nothing prevents a run."""
    colours, found = sys.stdout.isatty() and "NO_COLOR" not in os.environ, []
    for check in checks:
        found.append(check)
        if not as_json_text:
            print(as_line(check, colours), flush=True)
    ready = is_ready(found)
    print(as_json(found) if as_json_text else f"\n{'ready' if ready else 'NOT ready'}")
    return 0 if ready else 1


def as_json(checks: list[Finding]) -> str:
    """Format the findings for programs: {"ready": bool, "checks": [{what, state, found, next_step}]}."""
    return json.dumps({"ready": is_ready(checks), "checks": [asdict(check) for check in checks]}, indent=1)


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
