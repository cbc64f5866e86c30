"""Judges how a site has set up Slurm: whether trainings that lose their place can save and come again."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from vlmflow.remote.doctor import Finding
from vlmflow.remote.library import counted
from vlmflow.remote.slurm.partitions import Partition, why_in_none, why_not
from vlmflow.remote.slurm.queue import SlurmError, ask
from vlmflow.remote.slurm.request import Request

EARLY_SECONDS = 60
"""Slurm sends the signal before a time limit up to so much earlier than asked (sbatch(1), --signal)."""

SHORT_MEMORY = 60
"""Seconds after its end for which a job must stay in the queue, so that a look at it finds its state."""

LITTLE_TIME = 30
"""Seconds between SIGTERM and SIGKILL in which at least small models are saved."""


def read_config(text: str) -> dict[str, str]:
    """Read what `scontrol show config` prints: `KEY = VALUE` lines."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def check_controller(config: Mapping[str, str]) -> Finding:
    """Say which Slurm answered."""
    name, version = config.get("ClusterName", "?"), config.get("SLURM_VERSION", "of unknown version")
    return Finding("Slurm", "ok", f"{version}, cluster {name}; its controller answers")


def check_accounting() -> Finding:
    """Say whether Slurm keeps accounts of jobs."""
    try:
        ask("sacct", "-X", "-n", "-P", "-o", "JobID")
    except SlurmError as error:
        return Finding("accounting", "ok", f"off ({error.cause}): how jobs end is read from squeue")
    return Finding("accounting", "ok", "on: sacct answers")


def check_accounts(requests: Sequence[Request], of_user: frozenset[str] | None, enforced: bool) -> Finding:
    """Judge the accounts that jobs name. of_user: the user's, None if unknown. enforced: whether jobs need one."""
    named = sorted({request.account for request in requests if request.account})
    if of_user is None:
        state = f"jobs name {', '.join(named)}" if named else "jobs name none"
        return Finding("account", "ok", f"{state}; Slurm tells of none")
    if unknown := [name for name in named if name.lower() not in of_user]:
        step = f"set `slurm_account` in your profile to one of {', '.join(sorted(of_user))}"
        return Finding("account", "fail", f"you have no account {', '.join(unknown)}", step)
    yours = f"yours: {', '.join(sorted(of_user))}"
    if not named and enforced and len(of_user) > 1:
        step = "set `slurm_account` in default-resources of your profile, if your default one is not meant"
        return Finding("account", "warn", f"jobs name none; {yours}", step)
    return Finding("account", "ok", f"jobs use {', '.join(named) or 'your default one'}; {yours}")


def check_partition(partition: Partition) -> Finding:
    """Say what a partition has."""
    limit = "no time limit" if partition.max_minutes is None else f"{counted(partition.max_minutes, 'minute')} at most"
    sorts = Counter(
        f"{counted(node.cpus, 'core')}, {node.memory_mb / 1000:,.0f} GB"
        + "".join(f", {counted(n, 'GPU')}{f' of {model}' if model else ''}" for model, n in node.gpus.items())
        for node in partition.nodes
    )
    nodes = "; ".join(f"{counted(number, 'node')} of {sort}" for sort, number in sorts.most_common(5))
    detail = f"{limit}; {nodes or 'no nodes'}"
    closed = why_not(partition, Request("", threads=0))
    if closed is not None:
        return Finding(f"partition {partition.name}", "fail", f"{closed}; {detail}", "name another in your profile")
    return Finding(f"partition {partition.name}", "ok", detail)


def check_run(
    run: str, requests: Sequence[Request], site: Mapping[str, Partition], of_user: frozenset[str] | None
) -> Iterator[Finding]:
    """Check that a partition can hold every job of a run. requests: those of its jobs."""
    refusals = dict.fromkeys(filter(None, (why_in_none(request, site, of_user) for request in requests)))
    for why, step in refusals:
        yield Finding(f"run {run}", "fail", why, step)
    if not refusals:
        largest = max(requests, key=lambda request: (request.gpus, request.mem_mb, request.nodes))
        words = f"{counted(largest.threads, 'core')}, {largest.mem_mb / 1000:,.0f} GB"
        words += f", {counted(largest.gpus, 'GPU')}" if largest.gpus else ""
        detail = f"each of its {counted(len(requests), 'job')} fits; the largest is {largest.rule} ({words})"
        yield Finding(f"run {run}", "ok", detail)


def check_time(request: Request, partition: Partition) -> Finding:
    """Say in how many jobs a training runs that saves before each time limit and comes again."""
    row, run = f"time of {request.rule}", f"run {request.run}: " if request.run else ""
    limit, wanted = partition.max_minutes, request.runtime
    if limit is None or wanted <= limit:
        there = "no limit" if limit is None else f"{limit:,}"
        return Finding(row, "ok", f"{run}{counted(wanted, 'minute')}; partition {partition.name} has {there}")
    useful = limit - math.ceil((request.warning + EARLY_SECONDS) / 60)
    detail = f"{run}{counted(wanted, 'minute')}; partition {partition.name} ends jobs after {limit:,}"
    if useful < 1:
        step = f"name a partition with a longer limit: jobs are told to save {request.warning} s before it"
        return Finding(row, "fail", f"{detail}, which leaves no time to train", step)
    number = counted(math.ceil(wanted / useful), "job")
    return Finding(row, "ok", f"{detail}: {number}, one after the other, each of which resumes the training")


def check_preemption(partition: Partition, config: Mapping[str, str], warning: int) -> Finding:
    """Judge what a preemption leaves of a training. warning: the seconds in which one should save."""
    row, mode = f"preemption in {partition.name}", partition.preempt_mode
    wait = _seconds(config, "KillWait")
    if config.get("PreemptType", "").endswith("/none") or mode == "OFF":
        return Finding(row, "ok", f"none; SIGKILL follows SIGTERM after {wait} s (KillWait)")
    grace = partition.grace_seconds or wait
    detail = f"{mode} with GraceTime {partition.grace_seconds} s and KillWait {wait} s"
    if "SUSPEND" in mode or "GANG" in mode:
        return Finding(row, "warn", f"{detail}: trainers are stopped, and go on later", "nothing, if GPUs stay theirs")
    if "CANCEL" in mode:
        detail = f"{detail}: Slurm does not bring a job back; the executor submits it again"
    if grace < warning:
        step = (
            "nothing, if a checkpoint is written faster; else a training resumes from its last one "
            "(train.checkpoint_steps), or ask the site for a longer GraceTime"
        )
        return Finding(row, "warn", f"{detail}: {grace} s to save", step)
    return Finding(row, "ok", f"{detail}: {grace} s to save")


def check_settings(config: Mapping[str, str]) -> Iterator[Finding]:
    """Judge what the whole site has set: signals, and how long ended jobs stay in the queue."""
    wait, over = _seconds(config, "KillWait"), config.get("OverTimeLimit", "0 min")
    if wait < LITTLE_TIME:
        step = "nothing, for jobs at their time limit; after scancel, a training may resume from its last checkpoint"
        yield Finding("KillWait", "warn", f"{wait} s between SIGTERM and SIGKILL", step)
    more = "" if over.split()[0] == "0" else f", {over} after it (OverTimeLimit)"
    requeue = "come again by themselves" if config.get("JobRequeue") == "1" else "come again because they ask for it"
    yield Finding("lost jobs", "ok", f"end at their time limit{more}; {requeue} after a node is lost")
    age = _seconds(config, "MinJobAge")
    if age < SHORT_MEMORY:
        step = "nothing, if accounting is on; else a failed job may be read as lost, and run once more"
        yield Finding("MinJobAge", "warn", f"an ended job is forgotten after {age} s", step)
    tracking = config.get("ProctrackType", "").rpartition("/")[2]
    if tracking in ("pgid", ""):
        step = "ask the site for proctrack/cgroup: processes that left their group stay on nodes after a job's end"
        yield Finding("processes of jobs", "warn", f"proctrack/{tracking}", step)
    else:
        yield Finding("processes of jobs", "ok", f"proctrack/{tracking}: all of them end with their job")


def _seconds(config: Mapping[str, str], key: str) -> int:
    number = config.get(key, "0").split()[:1]
    return int(number[0]) if number and number[0].isdecimal() else 0
