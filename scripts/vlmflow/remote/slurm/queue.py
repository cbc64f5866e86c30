"""Slurm's commands, what its queue says of this user's jobs, how a job ended, and how jobs are ended for good."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vlmflow.remote.job import NO_MEMORY, Ended, verdict_of
from vlmflow.remote.library import VlmflowError, counted, printable

SECONDS = 60.0
"""How long a command may take. Slurm's own commands give up after MessageTimeout, 10 s where nobody has changed it."""

OUTAGES = (
    *("contact slurm controller", "timed out", "connection refused", "zero bytes", "communication", "try again"),
    *("unexpected message received", "message receive failure", "message send failure", "standby mode"),
    *("temporarily unavailable", "endpoint is not connected", "protocol authentication error"),
)
"""What Slurm's commands say (in lower case) when the controller does not answer."""

REFUSALS = (
    *("invalid", "not permitted", "not available", "not allowed", "denied", "violates", "exceed", "unrecognized"),
    *("cannot be satisfied", "unable to open", "more processors requested", "not found", "unknown"),
)
"""What they say when the answer is no. Whatever is neither may be an outage: `SlurmError.refusal`."""

PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "SLURM_CONF",
    "SLURM_JWT",
    "SLURM_CLUSTERS",
)
"""The variables of the shell that Slurm's commands see. Others would change what squeue shows (SQUEUE_PARTITION), or
what sbatch starts (SBATCH_ARRAY_INX)."""

OF_SLURM = ("SLURM_", "SBATCH_", "SRUN_")
"""How the variables begin that sbatch does not see; all others are those of the job, too."""


class SlurmError(VlmflowError):
    """A command of Slurm that failed.

    outage: whether the controller gave no answer, so that asking again may help. refusal: whether its answer is no;
    neither is true of words that nobody knows.
    """

    def __init__(self, cause: str, next_step: str, outage: bool = False, refusal: bool = True) -> None:
        super().__init__(cause, next_step)
        self.outage, self.refusal = outage, refusal


def refuse_without_slurm() -> None:
    """Raise VlmflowError if this machine has no commands of Slurm."""
    if shutil.which("sbatch") is None:
        raise VlmflowError(
            "this machine has no sbatch: it is not a login node of a Slurm cluster",
            "use a login node (`module load slurm` on some), or call Snakemake without the profile: docs/slurm.md",
        )


def ask(*words: str, script: str | None = None, environment: Mapping[str, str] = {}) -> str:
    """Run a command of Slurm, and return what it prints. Its words are a list; no shell reads them.

    script: its standard input; its job has the variables of the shell. environment: variables for it, besides ours.

    Raises SlurmError if it fails, or takes longer than SECONDS.
    """
    ours = {name: os.environ[name] for name in PASSED if name in os.environ}
    if script is not None:
        ours |= {name: value for name, value in os.environ.items() if not name.startswith(OF_SLURM)}
    try:
        done = subprocess.run(
            words,
            input=script or "",
            env={**ours, "SLURM_TIME_FORMAT": "standard", **environment},
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
        message = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        outage, refusal = (any(word in message.lower() for word in known) for known in (OUTAGES, REFUSALS))
        step = "take the step that docs/slurm.md names for what Slurm says"
        raise SlurmError(f"{words[0]}: {message}", step, outage, refusal and not outage)
    return done.stdout


OURS = "vlmflow"
"""The first word of the comment of each job of ours; `request.comment_of` gives the others."""

FIELDS = "%i|%T|%r|%N|%M|%V|%k|%j"
"""squeue's format. The last two are texts of people, and may have the separator, too."""

ACTIVE = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"} | {
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
"""The states of jobs that have not ended; COMPLETING may come again, as PENDING."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it.

    state: Slurm's word, as `RUNNING`. reason: why it waits, Slurm's word, as `Resources`. where: the names of its
    nodes, "" while it waits. used: seconds since its (last) start. submitted: as Slurm writes a time. words: those of
    our comment, () for a job of somebody else.
    """

    id: str
    state: str
    reason: str
    where: str
    used: int
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
    # By its number: $LOGNAME, which getpass believes, may be another's (sudo -E).
    answer = ask("squeue", "--all", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={FIELDS}")
    separators = FIELDS.count("|")
    lines = (line.split("|", separators) for line in answer.splitlines() if line.count("|") >= separators)
    return {job.id: job for job in map(_job, lines)}


def state_of(number: str) -> str:
    """Return the state of a job that squeue does not show, as scontrol shows it; "" if there is no such job.

    Raises SlurmError if Slurm gives no answer.
    """
    try:
        answer = ask("scontrol", "--oneliner", "show", "job", number)
    except SlurmError as error:
        if "invalid job id" in error.cause.lower():
            return ""
        raise
    state = re.search(r"\bJobState=(\w+)", answer)
    return state[1] if state else ""


def _job(fields: list[str]) -> QueuedJob:
    number, state, reason, where, used, submitted, comment, name = fields
    words = tuple(comment.split())
    ours = words if words[:1] == (OURS,) else ()
    return QueuedJob(number.strip(), state, reason, where, seconds(used) or 0, submitted, ours, name)


def seconds(text: str) -> int | None:
    """Read a time of Slurm, `[DAYS-][HOURS:]MINUTES:SECONDS`; None for UNLIMITED and others."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


ENDS = {
    "BOOT_FAIL": Ended("lost", "its node did not start"),
    "CANCELLED": Ended("refused", "it was cancelled (scancel)", again=False),
    "DEADLINE": Ended("out of time", "its deadline passed", again=False),
    "NODE_FAIL": Ended("lost", "its node failed"),
    "OUT_OF_MEMORY": Ended("out of memory", "it ran out of memory"),
    "PREEMPTED": Ended("preempted", "Slurm gave its place to another job"),
    "REVOKED": Ended("lost", "another cluster took it"),
    "TIMEOUT": Ended("out of time", "it reached its time limit, without time to save"),
}
"""The states in which a job can end, besides COMPLETED and FAILED."""

GONE = Ended("lost", "Slurm no longer knows it, and it made no target")

WHY = "why"
"""The key of a verdict that says why a job does not come again."""

KILLED_FOR_MEMORY = re.compile(r"oom[-_]kill event|out-of-memory handler|OOM Killed", re.IGNORECASE)
"""What slurmstepd writes into a job's log (22.05 to 24.11), whatever the job's state is then."""

NOT_STARTED = ("JobLaunchFailure", "launch failed requeued held", "BadConstraints", "ReservationDeleted")
"""The reasons (squeue's %r) of a job that ended before its script began."""

VERDICT_BYTES = 1000
"""A verdict is a short JSON text; whatever is longer is none."""


def ended_of(state: str, verdict_file: Path, reason: str = "", log: str = "") -> Ended | None:
    """Return how a job ended; None if it succeeded.

    state, reason: Slurm's words. verdict_file: into it the job's stage, or its Snakemake, may have written a verdict.
    log: the last lines of the job's output.
    """
    if state == "COMPLETED":
        return None
    if known := ENDS.get(state.partition(" ")[0]):  # `CANCELLED by 1000`
        return known
    verdict = read_verdict(verdict_file)
    if verdict.get(NO_MEMORY) is True or KILLED_FOR_MEMORY.search(log):
        return ENDS["OUT_OF_MEMORY"]
    if reason in NOT_STARTED:
        return Ended("failed", f"Slurm did not start it: {reason}")
    why = printable(str(verdict.get(WHY) or "its stage failed"))
    return Ended("failed", why, again=verdict.get("again") is not False)


def without_a_save(ended: Ended, rule: str) -> Ended:
    """Return the end of a job that saves nothing: at its time limit, another attempt would reach that, too."""
    if ended.how != "out of time" or not ended.again:
        return ended
    step = f"raise its runtime: --set-resources {rule}:runtime=MINUTES, or set-resources in your profile"
    return replace(ended, cause=f"{ended.cause}; {step}", again=False)


def read_verdict(file: Path) -> dict[str, object]:
    """Return what a stage wrote as its verdict; {} if it wrote none that can be read."""
    try:
        with file.open("rb") as opened:
            return verdict_of(opened.read(VERDICT_BYTES + 1), VERDICT_BYTES)
    except OSError:
        return {}


UNTIL_ENDED = 120.0
"""Seconds to wait for jobs that Slurm is ending; it kills them after KillWait, 30 s where nobody has changed it."""


def end_jobs(warnings: Mapping[str, int], say: Callable[[str], None]) -> None:
    """End jobs for good, and return when they have ended: those that wait at once, trainers after they have saved.

    warnings: the seconds that each has to save, by its number; 0 if it saves nothing. say: prints a line. Ctrl-C
    (KeyboardInterrupt) ends all at once.
    """
    numbers = list(warnings)
    try:
        for number in numbers:  # so that none asks to come again
            _try("scontrol", "update", f"JobId={number}", "Requeue=0")
        _cancel(numbers, "--state=PENDING")
        saving = [number for number, job in jobs().items() if warnings.get(number) and job.state == "RUNNING"]
        if saving:
            say(f"{counted(len(saving), 'job')} of trainers: to save a checkpoint and end. Ctrl-C ends them at once.")
        _cancel(saving, "--signal=TERM")
        _cancel([number for number in numbers if number not in saving])
        give_up = time.monotonic() + max((warnings[number] for number in saving), default=0)
        while saving and time.monotonic() < give_up:
            time.sleep(1)
            queue = jobs()
            saving = [number for number in saving if number in queue and queue[number].is_active]
        _cancel(saving)
    except KeyboardInterrupt:
        _cancel(numbers)
    except SlurmError as error:
        say(f"{error.cause}; these jobs may still run: {' '.join(numbers)}. scancel ends them.")


def wait_until_ended(numbers: Collection[str]) -> None:
    """Wait for jobs that Slurm is ending, at most UNTIL_ENDED: until then their stages may still write.

    Raises SlurmError if Slurm gives no answer.
    """
    give_up = time.monotonic() + UNTIL_ENDED
    while time.monotonic() < give_up:
        queue = jobs()
        if not any(number in queue and queue[number].state == "COMPLETING" for number in numbers):
            return
        time.sleep(1)


def _cancel(numbers: list[str], *options: str) -> None:
    if numbers:
        _try("scancel", *options, *numbers)


def _try(*words: str) -> None:
    """Run a command that also fails for a job which has just ended. Raises SlurmError if Slurm does not answer."""
    try:
        ask(*words)
    except SlurmError as error:
        if error.outage:
            raise
