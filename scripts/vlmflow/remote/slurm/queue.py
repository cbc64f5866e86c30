"""What Slurm's queue says of this user's jobs."""

import getpass
import re
from dataclasses import dataclass

from vlmflow.remote.slurm.commands import ask

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
