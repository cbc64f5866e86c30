"""The log, and the exceptions that a stage raises on purpose.

Texts from outside, and counts, for terminals and pages.

How a stage says why it failed, to Snakemake's process and to whoever runs its pod; and how its log is read there.
"""

import errno
import logging
import re
from pathlib import Path

log = logging.getLogger("vlmflow")
"""The log of all stages: the console and the stage's log file."""


class VlmflowError(Exception):
    """A failure that a person can act on.

    cause: what is wrong, with its file, row, key and value.
    next_step: what to do, as an instruction. Keys have their full path; `harness.stage` replaces NAME in
    `datasets.NAME` and `runs.NAME`.
    """

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(cause, next_step)
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.cause}\n  what to do: {self.next_step}"


class PassingError(VlmflowError):
    """A failure that another attempt may avoid: a full disk, an unreachable server, an interruption.

    Every other VlmflowError would occur again, so a cluster does not retry its job.
    """


class InterruptedTrainingError(PassingError):
    """A training that a signal ended before its target. saved: whether it saved progress since it started."""

    def __init__(self, cause: str, next_step: str, saved: bool) -> None:
        super().__init__(cause, next_step)
        self.saved = saved


NO_ROOM = "free disk space there, then run the same command again"
NOT_ALLOWED = "let this user read and write there, or work in another folder (--directory)"
NO_LOCKS = "this volume has no file locks; work in a folder on one that has (--directory)"
FAULTY = "look at the disk, or at its server (dmesg), then run the same command again"
OF_SYSTEM = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NOT_ALLOWED),
    **dict.fromkeys((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP), NO_LOCKS),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV), FAULTY),
    errno.EMFILE: "allow a process more open files (ulimit -n 4096), then run the same command again",
    errno.ENFILE: "the machine has too many open files; run the same command again when others have ended",
    errno.ENOENT: "somebody removed it meanwhile: run the same command again",
}
"""What to do about an OSError that no module expects, by its number."""


def of_system(error: OSError, place: object) -> PassingError | None:
    """Return an error of the operating system with its path and the next step; None if its number has none.

    place: where it happened, if the error names no path.
    """
    if error.errno not in OF_SYSTEM:
        return None
    where = place if error.filename is None else error.filename
    return PassingError(f"{error.strerror}: '{where}'", OF_SYSTEM[error.errno])


def printable(text: str) -> str:
    """Return a text with � for each character that cannot be printed: a terminal might obey it."""
    return "".join(character if character.isprintable() else "�" for character in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` gives it."""
    return "\n".join(map(printable, text.splitlines()))


def counted(number: int, unit: str) -> str:
    """Return a number with its unit, which is given in the singular: 1 row, 2 processes, 1,234 pictures."""
    many = f"{unit}es" if unit.endswith(("s", "ch")) else f"{unit}s"
    return f"{number:,} {unit if number == 1 else many}"


FAILURE = "the stage failed: "
"""The start of the last lines of a failed stage's log; Snakemake's process prints these lines again at its end."""

VERDICT = "VLMFLOW_VERDICT"
"""The environment variable with the file into which a stage that runs elsewhere writes its verdict; in a pod it is the
container's termination message, which the API server shows in the pod's status. Snakemake, which runs the stage, passes
on only exit code 1."""

NOT_AGAIN = {"again": False}
"""The verdict of a stage whose failure would repeat: a closed gate, a refused row or setting."""

SAVED = "saved"
"""The key of the verdict of a training that was interrupted: whether it saved progress since it started."""

SHOWN_BYTES = 1 << 20
"""How much of a log's end is read."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, set its title, or change the text's direction; not tab and line feed."""


def plain(text: str) -> str:
    """Return the text without control characters: a log holds whatever a job, its data and its libraries wrote."""
    return CONTROL.sub("", text)


def end_of(log: Path) -> str:
    """Return the end of a log file, plain."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - SHOWN_BYTES))
        return plain(stream.read(SHOWN_BYTES).decode(errors="replace"))
