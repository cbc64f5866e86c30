"""Explains why a job of Slurm waits: Slurm's word for the reason (`squeue --format=%r`), in plain words.

The words are those of https://slurm.schedmd.com/job_reason_codes.html and of `man squeue`, for Slurm 22.05 to 24.11.
While Snakemake follows jobs, it tells on the screen why they wait, and how far they are.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmflow.remote.job import last_lines, newest_progress
from vlmflow.remote.library import LOG_INTERVAL, printable
from vlmflow.remote.slurm.queue import QueuedJob

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
    "PartitionConfig": "no node of its partition has so many cores or GPUs, or so much memory: "
    "`vlmflow doctor --on slurm` shows what each can hold",
    "BadConstraints": "no node has what it asks for: `vlmflow doctor --on slurm` shows what each partition can hold",
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
    r"(?P<whose>QOS|Assoc|)(?P<scope>Grp|Max|Min)(?P<amount>BB|Billing|Cpu|CPU|Energy|GRES|Jobs?|License|Mem(?:ory)?|Node|"
    r"SubmitJobs?|Unknown|Wall(?:Duration)?)(?P<minutes>(?:Run)?Minutes)?(?:Per(?P<per>Job|Node|User|Account))?"
    r"(?:Limit|NotSatisfied)?"
)
"""Words such as QOSMaxGRESPerUser or AssocGrpCPUMinutesLimit: whose limit it is, and of what."""

OLD_LIMIT = re.compile(r"(?P<whose>QOS|Assoc)(?:iation)?(?P<amount>Job|Resource|Time)Limit")
"""The same in older versions, which say less."""

AMOUNTS = {
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


def reason_in_words(reason: str) -> str:
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
        return f"{_owner(old)} allows no more {AMOUNTS[old['amount']]}"
    limit = LIMIT.fullmatch(word)
    if limit is None:
        return None
    name = limit["amount"].removesuffix("s").removesuffix("ory").removesuffix("Duration").replace("CPU", "Cpu")
    owner, amount = _owner(limit), f"minutes of {AMOUNTS[name]}" if limit["minutes"] else AMOUNTS[name]
    if limit["scope"] == "Min":
        return f"{owner} asks for more {amount} than the job does: take another QOS"
    if _is_of_each_job(limit):
        job = "node of a job" if limit["per"] == "Node" else "job"
        return f"it asks for more {amount} than {owner} allows a {job}: ask for less, or take another QOS or account"
    if limit["scope"] == "Max":
        person = "account" if limit["per"] == "Account" else "user"
        return f"{owner} allows each {person} no more {amount} at a time: it starts when other jobs end"
    if limit["minutes"] == "Minutes":
        return f"{owner} has used up its {amount}: ask the site for more, or take another account"
    return f"the jobs of {owner} together use all {amount} that it allows: it starts when others of them end"


def _is_of_each_job(limit: re.Match[str] | None) -> bool:
    """Whether it is a limit of each single job: no end of other jobs helps."""
    return limit is not None and (
        limit["scope"] == "Min" or (limit["scope"] == "Max" and limit["per"] in ("Job", "Node"))
    )


def _owner(limit: re.Match[str]) -> str:
    return "its account" if limit["whose"] == "Assoc" else "its QOS"


UNTIL_SAID = 30.0
"""Seconds that a job waits before it is said why: most start at once."""


@dataclass
class _Known:
    """What was said of a job. since: when it was first seen waiting. started: whether it has been seen running."""

    reason: str = ""
    since: float | None = None
    started: bool = False
    progress: str = ""
    shown: float = -LOG_INTERVAL


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
                self._say(f"{words}: job {job.id} waits: {printable(reason_in_words(job.reason))}")
        elif job.state == "RUNNING":
            known.started = True
            if now - known.shown >= LOG_INTERVAL and (line := newest_progress(last_lines(log))) != known.progress:
                known.progress, known.shown = line, now
                self._say(printable(line))
