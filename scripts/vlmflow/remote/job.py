"""A job of Snakemake as every executor sees it: what its rule declares, how a try of it ends, and what its log says."""

import atexit
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from vlmflow.remote.library import FAILURE, VERDICT, plain

TRAININGS_BY = "runs.{run}.nodes, processes, device, train.dataloader_workers and resources"
DECIDED_BY = {
    **dict.fromkeys(("train_smoke", "train_model"), TRAININGS_BY),
    "verify_merged": "runs.{run}.processes, device, verify.logits and resources",
}
OTHERS_DECIDED_BY = "the rule's own threads and resources (set-threads, set-resources), and runs.{run}.resources"
"""The keys that decide what a rule requests, by rules."""


def deciding_keys(rule: str, run: str) -> str:
    """Return the keys that decide what the jobs of a rule request, for people. run: "" if unknown."""
    return DECIDED_BY.get(rule, OTHERS_DECIDED_BY).format(run=run or "NAME")


@dataclass(frozen=True)
class RuleJob:
    """One job and the resources that its rule declares.

    mem_mb, disk_mb: MB (10⁶ bytes), 0 if not declared. runtime: minutes, 0 for no limit.
    template: the name of its pod template, None for the default one. nodes: its pods, each with these resources. runs:
    with several, the folder with the run folders of its run.
    """

    rule: str
    wildcards: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    mem_mb: int = 0
    disk_mb: int = 0
    runtime: int = 0
    gpus: int = 0
    template: str | None = None
    nodes: int = 1
    runs: str = ""

    @classmethod
    def of(cls, job: Any) -> Self:
        """Read these from a job of Snakemake."""
        resources = dict(job.resources)
        wildcards, nodes = dict(getattr(job, "wildcards_dict", {})), int(resources.get("nodes") or 1)
        return cls(
            rule="+".join(job.rules),
            wildcards=wildcards,
            threads=job.threads,
            mem_mb=int(resources.get("mem_mb") or 0),
            disk_mb=int(resources.get("disk_mb") or 0),
            runtime=int(resources.get("runtime") or 0),
            gpus=int(resources.get("gpu") or 0),
            template=resources.get("pod_template"),
            nodes=nodes,
            # A search's trial has no wildcard `run`; it reads fitted/RUN.
            runs=f"{job.params.run_store}/{wildcards.get('run') or Path(job.input.rows).name}" if nodes > 1 else "",
        )

    @property
    def words(self) -> str:
        """The job, for people: rule name=value."""
        return " ".join([self.rule, *(f"{name}={value}" for name, value in self.wildcards.items())])


def interrupt_when_told_to_end() -> None:
    """Make SIGTERM and SIGHUP interrupt Snakemake, as Ctrl-C does, so that it ends its jobs.

    On SIGTERM Snakemake would wait until all jobs end. A closed terminal would kill it and leave its jobs.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)


NO_MEMORY = "no_memory"
"""The key of a verdict that says that the kernel killed a process for its memory."""


def verdict_of(text: str | bytes, most: int) -> dict[str, object]:
    """Return what a stage, or its Snakemake, wrote as its verdict; {} if it wrote none that can be read.

    most: how long a verdict may be, which is a short JSON text.
    """
    try:
        verdict = json.loads(text) if len(text) <= most else {}
    except (ValueError, RecursionError):
        return {}
    return verdict if isinstance(verdict, dict) else {}


def say_memory_kills(workflow: Any) -> None:
    """Let this pod's Snakemake say at its end that the kernel killed a process for its memory, if the stage failed.

    Kubernetes calls only the end of a container's first process OOMKilled; with control groups of version 1, or with
    the kubelet's singleProcessOOMKill, the kernel kills another one, and the container ends with exit code 1.
    """
    killed = memory_kills(in_pod=True)

    def say() -> None:
        failed = workflow.scheduler is None or workflow.scheduler.failed
        if failed and killed():
            with suppress(OSError):
                Path(os.environ[VERDICT]).write_text(json.dumps({NO_MEMORY: True}))

    atexit.register(say)


def memory_kills(
    own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup"), in_pod: bool = False
) -> Callable[[], bool]:
    """Return a function that says whether the kernel has since killed a process of this job for its memory.

    own: the list of this process's control groups. mounted: the folder of all; in a pod it holds just the container's.
    """
    before = _count_memory_kills(own, mounted, in_pod)  # a machine's own group has those of other jobs
    return lambda: _count_memory_kills(own, mounted, in_pod) > before


def _count_memory_kills(own: Path, mounted: Path, in_pod: bool) -> int:
    """Return how many processes the kernel has killed, as control groups of any version count them."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return 0
    kills = 0
    for _, controllers, group in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = mounted / ("memory" if controllers else "") / group.lstrip("/")
        # Of Slurm: the task's, the step's, and the job's; those above are of other jobs, too.
        places = [folder, *(above for above in folder.parents if "/job_" in str(above))]
        for place in [*places, *([mounted / ("memory" if controllers else "")] if in_pod else [])]:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError, ValueError):
                    counts = dict(line.split() for line in (place / name).read_text().splitlines())
                    kills += int(counts.get("oom_kill", 0))
    return kills


MORE_MEMORY = 1.5
"""The memory of the next attempt, relative to one that was killed for its memory."""


@dataclass(frozen=True)
class Ended:
    """The end of one try of a job.

    how: "failed" by an error of its own; "lost" with its machine, or removed by somebody; "preempted" by whoever needs
    its place; "out of time" or "out of memory", at its limit; "refused" before it began. cause: for people. again:
    whether another attempt may help.
    """

    how: Literal["failed", "lost", "preempted", "out of time", "out of memory", "refused"] = "failed"
    cause: str = ""
    again: bool = True

    @property
    def taken_away(self) -> bool:
        """Whether the job itself did not fail: it may be made again within the same attempt."""
        return self.how in ("lost", "preempted")


class Attempts:
    """The attempts of an invocation's jobs. Snakemake counts them; an executor can only tell it that none is left.

    most_mem_mb: the memory limit, in MB, of an attempt after one that was killed for its memory.
    """

    def __init__(self, most_mem_mb: int) -> None:
        self._most = most_mem_mb
        self._mem_mb: dict[str, int] = {}

    def mem_mb(self, words: str, declared: int) -> int:
        """Return the memory, in MB, of the next attempt of a job.

        words: its rule and wildcards. declared: the memory that its rule declares.
        """
        return self._mem_mb.get(words, declared)

    def after(self, job: Any, words: str, declared: int, ended: Ended) -> str:
        """Decide whether Snakemake tries a job again, and with how much memory; returns the cause, and what follows.

        job: Snakemake's. words, declared: as for `mem_mb`.
        """
        cause, again, before = ended.cause, ended.again, self.mem_mb(words, declared)
        if ended.how == "out of memory":
            more = min(int(before * MORE_MEMORY), self._most)
            again, self._mem_mb[words] = more > before, more
            cause += f" ({before} MB)"
            if not again:
                cause += "; cluster.max_mem_mb allows no more"
            elif job.restart_times > job.attempt - 1:
                cause += f"; the next attempt gets {more} MB"
        if not again:
            # Snakemake only counts attempts: this is the way to prevent a retry.
            job.attempt = max(job.attempt, job.restart_times + 1)
            cause += "\nThis job is not retried: it would fail in the same way."
        return cause


PROGRESS = re.compile(r"left|\d:\d\d|/step|evaluating and saving")
"""What follows the first middle dot in the lines of vlmflow.core.progress and vlmflow.supervisor.watch."""

LINES = 60
"""How many of a log's last lines are read."""

LONGEST = 2_000
"""Characters of a line that are shown; a longer line does not count as progress."""


def last_lines(log: Path) -> str:
    """Return the last LINES lines of a log file, as they are; "" if there is none that can be read.

    Of longer lines than LONGEST it returns fewer.
    """
    try:
        if not log.is_file():  # a device or a pipe might never end
            return ""
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LINES * LONGEST))
            lines = stream.read(LINES * LONGEST).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return "\n".join(lines[-LINES:])


def newest_progress(log: str) -> str:
    """Return the log's last line of progress, or ""."""
    for line in reversed(log.splitlines()):
        line = plain(line.rpartition("\r")[2]).strip()
        work, _, behind = line.partition(" · ")
        if len(line) <= LONGEST and work and PROGRESS.search(behind):
            return line
    return ""


def cause(log: str) -> str:
    """Return the failure that the stage reports, or else the log's last lines."""
    log = plain(log)
    if FAILURE in log:
        # Snakemake's own text in the pod.
        failure = log[log.rindex(FAILURE) :].partition("\nRuleException")[0]
        lines = failure.strip().splitlines()[:12]
    else:
        lines = log.strip().splitlines()[-8:]
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]} …" for line in lines)
