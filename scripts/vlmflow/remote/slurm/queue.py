"""Runs Slurm's commands. Their words are lists and their texts are lines; no shell reads either.

What Slurm's queue says of this user's jobs.
"""

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from vlmflow.core.errors import VlmflowError

SECONDS = 60.0
"""How long a command may take. Slurm's own commands give up after MessageTimeout, 10 s where nobody has changed it."""

OUTAGES = ("contact slurm controller", "timed out", "connection refused", "zero bytes", "communication", "try again")
"""What Slurm's commands say (in lower case) when the controller does not answer; anything else is its answer."""


OF_PEOPLE = "SQUEUE_"
"""How the variables begin with which people let squeue show less (SQUEUE_PARTITION); a job left out would seem gone."""


class SlurmError(VlmflowError):
    """A command of Slurm that failed. outage: whether the controller gave no answer, so that asking again may help."""

    def __init__(self, cause: str, next_step: str, outage: bool = False) -> None:
        super().__init__(cause, next_step)
        self.outage = outage


def refuse_without_slurm() -> None:
    """Raise VlmflowError if this machine has no commands of Slurm."""
    if shutil.which("sbatch") is None:
        raise VlmflowError(
            "this machine has no sbatch: it is not a login node of a Slurm cluster",
            "use a login node (`module load slurm` on some), or call Snakemake without the profile: docs/slurm.md",
        )


def ask(*words: str, script: str | None = None, environment: Mapping[str, str] = {}) -> str:
    """Run a command of Slurm, and return what it prints.

    script: its standard input. environment: variables for it, besides ours.

    Raises SlurmError if it fails, or takes longer than SECONDS.
    """
    try:
        done = subprocess.run(
            words,
            input=script or "",
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(OF_PEOPLE)},
                "SLURM_TIME_FORMAT": "standard",
                **environment,
            },
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise SlurmError(f"this machine has no {words[0]}", "use a login node of Slurm: docs/slurm.md") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer for {SECONDS:.0f} s", "try again later", outage=True) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        outage = any(word in said.lower() for word in OUTAGES)
        raise SlurmError(f"{words[0]}: {said}", "take the step that docs/slurm.md names for what Slurm says", outage)
    return done.stdout


OURS = "vlmflow"
"""The first word of the comment of each job of ours; `remote.slurm.request.comment_of` gives the others."""

FIELDS = "%i|%T|%r|%P|%D|%N|%M|%l|%V|%k|%j"
"""squeue's format. The last two are texts of people, and may have the separator, too."""

ACTIVE = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"} | {
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
"""The states of jobs that have not ended; COMPLETING may come again, as PENDING."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it.

    state: Slurm's word, as `RUNNING`. reason: why it waits, Slurm's word, as `Resources`. nodes: their number.
    where: their names, "" while it waits. used: seconds since its (last) start. limit: its time limit in seconds, None
    without one. submitted: as Slurm writes a time. words: those of our comment, () for a job of somebody else.
    """

    id: str
    state: str
    reason: str
    partition: str
    nodes: int
    where: str
    used: int
    limit: int | None
    submitted: str
    words: tuple[str, ...]
    name: str

    @property
    def is_active(self) -> bool:
        """Whether it waits, runs, or has yet to be cleaned up."""
        return self.state in ACTIVE


def jobs() -> dict[str, QueuedJob]:
    """Return this user's jobs that Slurm still knows (those that ended, for MinJobAge), by id.

    Raises SlurmError if Slurm gives no answer.
    """
    said = ask("squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", f"--format={FIELDS}")
    found = (_job(line.split("|", FIELDS.count("|"))) for line in said.splitlines() if line.count("|") >= 10)
    return {job.id: job for job in found}


def _job(fields: list[str]) -> QueuedJob:
    number, state, reason, partition, nodes, where, used, limit, submitted, comment, name = fields
    words = tuple(comment.split())
    return QueuedJob(
        number.strip(),
        state,
        reason,
        partition,
        int(nodes) if nodes.isdigit() else 1,
        where,
        seconds(used) or 0,
        seconds(limit),
        submitted,
        words if words[:1] == (OURS,) else (),
        name,
    )


def seconds(text: str) -> int | None:
    """Read a time of Slurm, `[DAYS-][HOURS:]MINUTES:SECONDS`; None for UNLIMITED and others."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
