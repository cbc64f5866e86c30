"""What a job asks of Slurm: the words of sbatch, the script that runs the job's Snakemake, and its comment.

By the comment a later call finds the jobs that an earlier one left: a call that was killed, or that could not end them.
"""

import hashlib
import json
import re
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from snakemake.exceptions import WorkflowError
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.validation import validate_slurm_extra

from vlmflow.remote.job import RuleJob
from vlmflow.remote.library import SCRIPTS
from vlmflow.remote.slurm import in_job
from vlmflow.remote.slurm.queue import OURS, QueuedJob, jobs, wait_until_ended

GROUP = "the group"


@dataclass(frozen=True)
class Request(RuleJob):
    """What a job, or a group of jobs that share one, needs of a partition; amounts are those of each of its nodes.

    model: of the GPUs, None for any. warning: seconds before its end at which it is told to save and to come again; 0
    for a job that cannot. partitions: those that it names, any of which may run it; () for Slurm's default one.
    account: None for the user's default one.
    """

    model: str | None = None
    warning: int = 0
    partitions: tuple[str, ...] = ()
    account: str | None = None

    @classmethod
    def of(cls, job: Any, gpu_model: str | None = None) -> Self:
        """Read these from a job of Snakemake, or from a group: of its largest, and its longest.

        gpu_model: `slurm.gpu_model` of the configuration. A rule may ask for GPUs by `gres`, too, as `gpu:a100:2`.
        """
        resources, rule_job = job.resources, rule_job_of(job)
        by_gres = gpus_in(str(resources.get("gres") or ""))
        members = job.jobs if job.is_group() else [job]
        declared = vars(rule_job) | {
            "rule": f"{GROUP} {job.groupid}" if job.is_group() else job.name,
            "runtime": max(int(member.resources.get("runtime") or 0) for member in members),
            "gpus": rule_job.gpus or sum(by_gres.values()),
        }
        return cls(
            **declared,
            model=gpu_model or next(filter(None, by_gres), None),
            warning=warning_of(job),
            partitions=tuple(filter(None, str(resources.get("slurm_partition") or "").split(","))),
            account=resources.get("slurm_account") or None,
        )

    @property
    def run(self) -> str:
        """The run that it belongs to; "" if it has none."""
        return self.wildcards.get("run", "")


def rule_job_of(job: Any) -> RuleJob:
    """Return what a job declares. Several stages in one job need no room for all at once: their Snakemake knows it."""
    rule_job = RuleJob.of(job)
    if not job.is_group():
        return rule_job
    members = [RuleJob.of(member) for member in job.jobs]
    most = {name: max(getattr(member, name) for member in members) for name in ("threads", "mem_mb")}
    return replace(rule_job, rule=job.groupid, **most)


def warning_of(job: Any) -> int:
    """Return how many seconds before its end a job of Snakemake is told to save; 0 if it saves nothing."""
    return int(job.resources.get("warning_seconds") or 0)


def gpus_in(gres: str) -> dict[str, int]:
    """Return the GPUs by model ("" for none) in a list of Slurm's generic resources, as `gpu:a100:4(S:0-1),disk:9`."""
    gpus: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = [word for word in resource.split(":") if word != "no_consume"]
        if words[0] == "gpu":
            number = int(words.pop()) if words[-1].isdecimal() else 1
            model = words[1] if len(words) > 1 else ""
            gpus[model] = gpus.get(model, 0) + number
    return gpus


class _Resources(dict[str, Any]):
    """Resources by key and by attribute, as the plugin reads them."""

    __getattr__ = dict.__getitem__


def sbatch_words(
    job: Any,
    rule_job: RuleJob,
    comment: str,
    *,
    slurm: Any,
    minutes: int | None,
    log: Path,
    workdir: str,
    partition: str,
    settings: Any,
) -> list[str]:
    """Return the call of sbatch, without its script.

    comment: see `comment_of`. slurm: the block of the configuration. minutes: the time limit, None for the partition's.
    log: the file of its output, with %j for the job's number. partition: an option as the plugin writes it. settings:
    the plugin's.

    Raises WorkflowError if a resource is not as the plugin wants it.
    """
    validate_slurm_extra(job)
    extra = shlex.split(str(job.resources.get("slurm_extra") or ""))
    if any(word.startswith(("--ar", "-a")) for word in extra):  # sbatch takes what begins an option, too
        raise WorkflowError("slurm_extra: --array would start the stage several times, into one output; remove it")
    resources = _Resources(dict(job.resources))
    resources |= {"mem_mb": rule_job.mem_mb or None, "runtime": minutes, "nodes": rule_job.nodes}
    if rule_job.nodes > 1 and not rule_job.gpus:
        resources["tasks"] = rule_job.nodes
    account = resources.get("slurm_account")  # without one, Slurm takes the user's own
    params = {
        "run_uuid": name_of(rule_job),
        "slurm_logfile": str(log.parent).replace("%", "%%") + f"/{log.name}",  # sbatch(1), filename pattern
        "comment_str": comment,
        "account": f"-A {shlex.quote(str(account))}" if account else "",
        "partition": partition,
        "workdir": workdir,
    }
    plain = SimpleNamespace(resources=resources, threads=rule_job.threads, name=job.name)
    words = shlex.split(get_submit_command(plain, params, settings))
    words += ["--open-mode=append", "--requeue"]  # a job that comes again has its log before it
    if rule_job.nodes > 1:
        words.append("--ntasks-per-node=1")
    options = [_gpus(rule_job, slurm)] if rule_job.gpus else []
    if gres := resources.get("gres"):
        if options and slurm.gpus == "gres":  # of two options --gres Slurm takes the last
            options[0] += f",{gres}"
        else:
            options.append(f"--gres={gres}")
    words += options
    if (warning := resources.get("warning_seconds")) and "--signal" not in str(resources.get("slurm_extra") or ""):
        words.append(f"--signal=TERM@{int(warning)}")
    return words


def _gpus(rule_job: RuleJob, slurm: Any) -> str:
    """Return the request for GPUs: in the site's dialect, for each node if there are several."""
    number = f"{slurm.gpu_model}:{rule_job.gpus}" if slurm.gpu_model else str(rule_job.gpus)
    if slurm.gpus == "gres":
        return f"--gres=gpu:{number}"
    return f"--gpus-per-node={number}" if slurm.gpus == "gpus-per-node" or rule_job.nodes > 1 else f"--gpus={number}"


def name_of(rule_job: RuleJob) -> str:
    """Return a job's name in the queue."""
    return ":".join([rule_job.rule, *(["_".join(rule_job.wildcards.values())] if rule_job.wildcards else [])])


def script(command: str, python: str, rule_job: RuleJob) -> str:
    """Return the batch script, which runs the job's Snakemake as the first process of a step: signals reach that one.

    command: the plugin's, for a shell. python: the interpreter in it. On several nodes, `in_job` runs it on the first,
    and an agent of the training on each other one.
    """
    before, _, snakemake = command.partition(f"{python} -m snakemake")
    srun = ["srun", f"--nodes={rule_job.nodes}", f"--ntasks={rule_job.nodes}", "--ntasks-per-node=1"]
    srun += [f"--cpus-per-task={rule_job.threads}", "--cpu-bind=none"]
    if rule_job.nodes > 1:
        agent = [python, "-m", in_job.__name__, rule_job.runs, str(rule_job.threads)]
        srun += ["--kill-on-bad-exit=1", "env", f"PYTHONPATH={SCRIPTS}", *agent]
    return f"#!/bin/sh\n{before} exec {shlex.join(srun)} {python} -m snakemake{snakemake}\n"


def comment_of(job: Any, workdir: str) -> str:
    """Return the comment by which a later call finds a job that still runs: OURS, and digests.

    They are those of the working directory; of all that the job would make, from what, and how; and of each of its
    stages (rule and wildcards).
    """
    stages = sorted(job.jobs, key=_key) if job.is_group() else [job]
    made = [[_key(stage), sorted(map(str, stage.params)), sorted(map(str, stage.output))] for stage in stages]
    # The input files, with the times of those that exist.
    inputs = [
        [file, Path(file).lstat().st_mtime_ns if Path(file).exists() else None] for file in sorted(map(str, job.input))
    ]
    requested = [job.threads, *(job.resources.get(name) for name in ("gpu", "nodes"))]
    identity = digest([made, inputs, requested])
    return " ".join([OURS, digest(workdir), identity, *(digest(_key(stage)) for stage in stages)])


def _key(job: Any) -> str:
    return " ".join([job.rule.name, *(f"{name}={value}" for name, value in sorted(job.wildcards_dict.items()))])


def digest(value: Any) -> str:
    """Return a short digest of a value that JSON can hold: of a working directory, a stage, or what a job makes."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class EarlierJobs:
    """The jobs that earlier calls left in a folder. seen: the numbers of all jobs of Slurm that are no news."""

    def __init__(self, workdir: str, say: Callable[[str], None]) -> None:
        """Read the queue, after jobs have ended that Slurm is ending: one that was cancelled makes nothing any more.

        Raises SlurmError if Slurm gives no answer.
        """
        self._lock, ours = threading.Lock(), (OURS, digest(workdir))
        if ending := [job for job in jobs().values() if job.words[:2] == ours and job.state == "COMPLETING"]:
            say(f"waiting for jobs of an earlier call to end: {_names(ending)}")
            wait_until_ended([job.id for job in ending])
        queue = jobs()
        self.seen = set(queue)
        self._left = [
            job for job in queue.values() if job.words[:2] == ours and job.is_active and job.state != "COMPLETING"
        ]
        if self._left:
            say(f"Jobs of an earlier call still run: {_names(self._left)}")

    def take(self, stages: list[str]) -> list[QueuedJob]:
        """Return those that make one of these stages (the last words of `comment_of`), each only once."""
        with self._lock:  # two threads submit
            taken = [job for job in self._left if not set(job.words[3:]).isdisjoint(stages)]
            self._left = [job for job in self._left if job not in taken]
        return taken


def _names(left: list[QueuedJob]) -> str:
    return ", ".join(f"{job.name} ({job.id})" for job in left)
