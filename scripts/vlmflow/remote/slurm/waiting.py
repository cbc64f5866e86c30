"""Explains why a job of Slurm waits: Slurm's word for the reason (`squeue --format=%r`), in plain words.

The words are those of https://slurm.schedmd.com/job_reason_codes.html and of `man squeue`, for Slurm 22.05 to 24.11.

Tells on the screen what becomes of jobs while Snakemake follows them: why they wait, and how far they are.

The lines of `make status` for Slurm, one for each job of this user that vlmflow submitted and that has not ended.
"""

import getpass
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from vlmflow.core.errors import printable
from vlmflow.core.progress import LOG_INTERVAL, clock
from vlmflow.remote.findings import in_columns
from vlmflow.remote.job import last_lines, newest_progress
from vlmflow.remote.slurm.queue import QueuedJob, SlurmError, ask, jobs

WAITS = {
    "None": "Slurm has not looked at it yet",
    "WaitingForScheduling": "Slurm has not looked at it yet",
    "Resources": "all that it could use is taken: it starts when other jobs end",
    "Priority": "jobs of higher priority come first",
    "BeginTime": "its time to start has not come: Slurm starts a requeued job two minutes later at the earliest",
    "Dependency": "it waits for another job",
    "Constraints": "no node with the features that it asks for is free",
    "Licenses": "all licences that it asks for are taken",
    "Reservation": "its reservation has not begun: `scontrol show reservation`",
    "ReqNodeNotAvail": "the nodes that it may use are reserved or down: `scontrol show reservation` and "
    "`sinfo --list-reasons` say more; before a maintenance only a job that would end in time starts",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": "the nodes that it "
    "needs are down, drained, or kept for jobs of higher priority: `sinfo --list-reasons` says why",
    "NodeDown": "a node that it needs is down: `sinfo --list-reasons` says why",
    "FrontEndDown": "the machine that would start it is down",
    "PartitionDown": "its partition is down: `sinfo` shows the others",
    "PartitionInactive": "its partition starts no jobs now: `sinfo` shows the others",
    "AccountingPolicy": "a limit of its account or QOS is reached",
    "QOSUsageThreshold": "its QOS has used more than its share: it starts when that has decayed",
    "Cleaning": "its last start is still being cleaned up",
    "Prolog": "the site's preparation for it runs (Prolog)",
    "PrologSlurmctld": "the site's preparation for it runs (Prolog)",
    "JobArrayTaskLimit": "as many tasks of its array run as may at a time",
    "SchedDefer": "the site does not start jobs at once",
    "FedJobLock": "the clusters of its federation have yet to agree where it runs",
    "BurstBufferResources": "the burst buffer has no room",
    "BurstBufferStageIn": "its files are being copied into the burst buffer",
    "InactiveLimit": "its last start was ended, because it did nothing for too long",
    "SystemFailure": "its last start was ended by a failure of the system",
    "TimeLimit": "its last start reached its time limit",
    "NonZeroExitCode": "its last start failed",
    "OutOfMemory": "its last start ran out of memory",
}
"""Reasons that pass by themselves."""

HELD = {
    "JobHeldUser": "it is held: `scontrol release NUMBER` lets it start",
    "JobHeldAdmin": "an administrator holds it: ask the site",
    "JobHoldMaxRequeue": "it failed to start too often, so Slurm holds it: `scontrol release NUMBER` tries again",
    "JobLaunchFailure": "a node could not start it: tell the site",
    "launch failed requeued held": "a node failed to start it, so it is held: `scontrol release NUMBER` tries again",
    "job requeued in held state": "it was requeued and held: `scontrol release NUMBER` lets it start",
    "BurstBufferOperation": "the burst buffer failed: tell the site",
}
"""Reasons for which a person must do something; then the job starts as it is."""

NEVER = {
    "PartitionTimeLimit": "its time limit is above that of its partition: take another partition, or a shorter "
    "`resources.train_runtime`",
    "PartitionNodeLimit": "its partition allows no job of so many nodes: take another partition, or other `nodes`",
    "PartitionConfig": "no node of its partition has so many cores or GPUs, or so much memory: `make doctor ON=slurm` "
    "shows what each can hold",
    "BadConstraints": "no node has what it asks for: `make doctor ON=slurm` shows what each partition can hold",
    "MaxMemPerLimit": "it asks for more memory of a core or node than the site allows",
    "DependencyNeverSatisfied": "the job that it waits for has failed",
    "AccountNotAllowed": "its account may not use its partition: take another (`slurm_account`, `slurm_partition`)",
    "InvalidAccount": "its account is none of yours: `sacctmgr show associations user=$USER` lists yours "
    "(`slurm_account`)",
    "InvalidQOS": "there is no such QOS, or not for you: `sacctmgr show associations user=$USER` lists yours",
    "QOSNotAllowed": "its account or partition does not allow its QOS",
    "ReservationDeleted": "its reservation is gone",
    "DeadLine": "it can no longer end before its deadline",
}
"""Reasons for which a job never starts as it is, unless an administrator changes the cluster."""

LIMIT = re.compile(
    r"(?P<whose>QOS|Assoc|)(?P<kind>Grp|Max|Min)(?P<what>BB|Billing|Cpu|CPU|Energy|GRES|Jobs?|License|Mem(?:ory)?|Node|"
    r"SubmitJobs?|Unknown|Wall(?:Duration)?)(?P<minutes>(?:Run)?Minutes)?(?:Per(?P<each>Job|Node|User|Account))?"
    r"(?:Limit|NotSatisfied)?"
)
"""Words such as QOSMaxGRESPerUser or AssocGrpCPUMinutesLimit: whose limit it is, and of what."""

OLD_LIMIT = re.compile(r"(?P<whose>QOS|Assoc)(?:iation)?(?P<what>Job|Resource|Time)Limit")
"""The same in older versions, which say less."""

WHAT = {
    "BB": "burst buffer",
    "Billing": "billing units",
    "Cpu": "cores",
    "Energy": "energy",
    "GRES": "GPUs (GRES)",
    "Job": "running jobs",
    "License": "licences",
    "Mem": "memory",
    "Node": "nodes",
    "SubmitJob": "running and waiting jobs",
    "Unknown": "resources",
    "Wall": "time",
    "Resource": "resources",
    "Time": "time",
}


def explain(reason: str) -> str:
    """Return why a job waits, in plain words, and what to do where a person can do something.

    reason: Slurm's word, as squeue prints it; one that is not known is returned as it is.
    """
    word = _word(reason)
    words = WAITS.get(word) or HELD.get(word) or NEVER.get(word) or _limit(word)
    if words is None:
        return reason
    details = reason[len(word) :].lstrip(", ")
    return f"{words} ({details})" if details else words


def will_not_start(reason: str) -> bool:
    """Whether a job with this reason can never start as it is: waiting for it is no use.

    A held job is not such a one: a person may release it.
    """
    word = _word(reason)
    return word in NEVER or _is_of_each_job(LIMIT.fullmatch(word))


def starts_by_itself(reason: str) -> bool:
    """Whether a job with this reason starts without a person; only then the time that Slurm expects means something."""
    return not will_not_start(reason) and _word(reason) not in HELD


def _word(reason: str) -> str:
    """Return the reason without its details: `ReqNodeNotAvail, UnavailableNodes:node-b` names nodes."""
    return reason if reason in WAITS else reason.partition(",")[0]


def _limit(word: str) -> str | None:
    """Explain a limit of a QOS or an account; None for other words."""
    if old := OLD_LIMIT.fullmatch(word):
        return f"{_owner(old)} allows no more {WHAT[old['what']]}"
    limit = LIMIT.fullmatch(word)
    if limit is None:
        return None
    owner, what = _owner(limit), _what(limit)
    if limit["kind"] == "Min":
        return f"{owner} asks for more {what} than the job does: take another QOS"
    if _is_of_each_job(limit):
        each = "node of a job" if limit["each"] == "Node" else "job"
        return f"it asks for more {what} than {owner} allows a {each}: ask for less, or take another QOS or account"
    if limit["kind"] == "Max":
        each = "account" if limit["each"] == "Account" else "user"
        return f"{owner} allows each {each} no more {what} at a time: it starts when other jobs end"
    if limit["minutes"] == "Minutes":
        return f"{owner} has used up its {what}: ask the site for more, or take another account"
    return f"the jobs of {owner} together use all {what} that it allows: it starts when others of them end"


def _is_of_each_job(limit: re.Match[str] | None) -> bool:
    """Whether it is a limit of each single job: no end of other jobs helps."""
    return limit is not None and (
        limit["kind"] == "Min" or (limit["kind"] == "Max" and limit["each"] in ("Job", "Node"))
    )


def _owner(limit: re.Match[str]) -> str:
    return "its account" if limit["whose"] == "Assoc" else "its QOS"


def _what(limit: re.Match[str]) -> str:
    name = limit["what"].removesuffix("s").removesuffix("ory").removesuffix("Duration").replace("CPU", "Cpu")
    return f"minutes of {WHAT[name]}" if limit["minutes"] else WHAT[name]


UNTIL_SAID = 30.0
"""Seconds that a job waits before it is said why: most start at once."""


@dataclass
class _Known:
    """What was said of a job. since: when it was first seen waiting. started: whether it has been seen running."""

    reason: str = ""
    since: float | None = None
    started: bool = False
    progress: str = ""
    shown: float = field(default=-LOG_INTERVAL)


class News:
    """Says each thing once. say: prints a line."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def tell(self, words: str, job: QueuedJob, log: Path) -> None:
        """Say what is new of a job. words: its rule and wildcards. log: the file of its output."""
        known, now = self._known.setdefault(job.id, _Known()), self._clock()
        if job.state == "PENDING":
            if known.started:
                self._say(f"{words}: job {job.id} is in the queue again, and resumes; this uses no retry")
                self._known[job.id] = known = _Known()
            known.since = now if known.since is None else known.since
            if job.reason != known.reason and now - known.since >= UNTIL_SAID:
                known.reason = job.reason
                self._say(f"{words}: job {job.id} waits: {printable(explain(job.reason))}")
        elif job.state == "RUNNING":
            known.started = True
            if now - known.shown >= LOG_INTERVAL and (line := newest_progress(last_lines(log))) != known.progress:
                known.progress, known.shown = line, now
                self._say(printable(line))


STATES = {
    "PENDING": "waiting",
    "CONFIGURING": "starting",
    "COMPLETING": "ending",
    "STAGE_OUT": "ending",
    "SIGNALING": "running",
    "RESIZING": "running",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "held",
    "RESV_DEL_HOLD": "held",
    "SPECIAL_EXIT": "held",
}
"""Slurm's words for a job that has not ended, in ours; the others are the same in small letters."""


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def lines(folder: Path) -> list[str]:
    """Return a line for each job, in columns, or one line that says why there is none.

    folder: the working directory of Snakemake; of a job of another one the folder is shown, too.
    """
    try:
        ours = [job for job in jobs().values() if job.words and job.is_active]
        places = _places() if ours else {}
        rows = [_row(job, *places.get(job.id, ("", "")), folder) for job in sorted(ours, key=lambda job: job.submitted)]
    except SlurmError as error:
        return [f"Slurm does not answer: {printable(error.cause)}"]
    return in_columns(rows) or ["Slurm has no job of vlmflow"]


def _places() -> dict[str, tuple[str, str]]:
    """Return when Slurm expects each job of this user to start, as Slurm writes it, and the job's folder, by id."""
    said = ask("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%S|%Z")
    found = (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {job.strip(): (start, where) for job, start, where in found}


def _row(job: QueuedJob, start: str, where: str, folder: Path) -> list[str]:
    state = STATES.get(job.state, job.state.lower())
    rule, _, wildcards = job.name.partition(":")
    if job.where:
        age = clock(job.used)
        detail = _progress(job.id)
    else:
        submitted = _time(job.submitted)
        age = clock((datetime.now() - submitted).total_seconds()) if submitted else "-"
        detail = explain(job.reason)
        expected = _time(start)
        if expected and starts_by_itself(job.reason):
            detail += f"; Slurm expects to start it at {expected:%Y-%m-%d %H:%M}"
    if where and Path(where) != folder.resolve():
        detail = f"in {where}: {detail}" if detail else f"in {where}"
    cells = [f"{rule} {wildcards}".strip(), state, age, job.where or "-", job.id, detail]
    return list(map(printable, cells))


def _time(text: str) -> datetime | None:
    """Read a time of Slurm, which is this machine's, without a zone; None for N/A."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _progress(job: str) -> str:
    """Return the newest line of progress in the log of a job; "" if there is none yet, or the job has ended."""
    try:
        shown = ask("scontrol", "show", "job", job)
    except SlurmError as error:
        if error.outage:
            raise
        return ""
    log = re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE)
    return newest_progress(last_lines(Path(log[1]))) if log else ""
