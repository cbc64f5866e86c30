"""What a job asks of Slurm: the words of sbatch, and the script that runs the job's Snakemake."""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.validation import validate_slurm_extra

from vlmflow import SCRIPTS
from vlmflow.remote.job import RuleJob
from vlmflow.remote.slurm import node
from vlmflow.remote.slurm.queue import OURS


class _Resources(dict[str, Any]):
    """Resources by key and by attribute, as the plugin reads them."""

    __getattr__ = dict.__getitem__


def sbatch_words(
    job: Any,
    rule_job: RuleJob,
    comment: str,
    *,
    gpus_by: str,
    gpu_model: str | None,
    minutes: int | None,
    log: Path,
    workdir: str,
    account: str,
    partition: str,
    settings: Any,
) -> list[str]:
    """Return the call of sbatch, without its script.

    comment: see `comment_of`. gpus_by, gpu_model: `slurm.gpus` and `slurm.gpu_model` of the configuration. minutes: the
    time limit, None for the partition's. log: the file of its output, with %j for the job's number. account, partition:
    options as the plugin writes them. settings: the plugin's.

    Raises WorkflowError if a resource is not as the plugin wants it.
    """
    validate_slurm_extra(job)
    resources = _Resources(dict(job.resources))
    resources |= {"mem_mb": rule_job.mem_mb or None, "runtime": minutes, "nodes": rule_job.nodes}
    if rule_job.nodes > 1 and not rule_job.gpus:
        resources["tasks"] = rule_job.nodes
    params = {
        "run_uuid": name_of(rule_job),
        "slurm_logfile": log,
        "comment_str": comment,
        "account": account,
        "partition": partition,
        "workdir": workdir,
    }
    plain = SimpleNamespace(resources=resources, threads=rule_job.threads, name=job.name)
    words = shlex.split(get_submit_command(plain, params, settings))
    words += ["--open-mode=append", "--requeue"]  # a job that comes again has its log before it
    if rule_job.nodes > 1:
        words.append("--ntasks-per-node=1")
    asked = [_gpus(rule_job, gpus_by, gpu_model)] if rule_job.gpus else []
    if gres := resources.get("gres"):
        if asked and gpus_by == "gres":  # of two options --gres Slurm takes the last
            asked[0] += f",{gres}"
        else:
            asked.append(f"--gres={gres}")
    words += asked
    if (warning := resources.get("warning_seconds")) and "--signal" not in str(resources.get("slurm_extra") or ""):
        words.append(f"--signal=TERM@{int(warning)}")
    return words


def _gpus(rule_job: RuleJob, by: str, model: str | None) -> str:
    """Return the request for GPUs: in the site's dialect, for each node if there are several."""
    number = f"{model}:{rule_job.gpus}" if model else str(rule_job.gpus)
    if by == "gres":
        return f"--gres=gpu:{number}"
    return f"--gpus-per-node={number}" if by == "gpus-per-node" or rule_job.nodes > 1 else f"--gpus={number}"


def script(command: str, python: str, rule_job: RuleJob) -> str:
    """Return the batch script, which runs the job's Snakemake as the first process of a step: signals reach that one.

    command: the plugin's, for a shell. python: the interpreter in it. On several nodes, `remote.slurm.node` runs it on
    the first, and an agent of the training on each other one.
    """
    before, _, snakemake = command.partition(f"{python} -m snakemake")
    srun = ["srun", f"--nodes={rule_job.nodes}", f"--ntasks={rule_job.nodes}", "--ntasks-per-node=1"]
    srun += [f"--cpus-per-task={rule_job.threads}", "--cpu-bind=none"]
    if rule_job.nodes > 1:
        agent = [python, "-m", node.__name__, rule_job.runs, str(rule_job.threads)]
        srun += ["--kill-on-bad-exit=1", "env", f"PYTHONPATH={SCRIPTS}", *agent]
    return f"#!/bin/sh\n{before} exec {shlex.join(srun)} {python} -m snakemake{snakemake}\n"


def rule_job_of(job: Any) -> RuleJob:
    """Return what a job asks for. Several stages in one job need no room for all at once: their Snakemake knows it."""
    rule_job = RuleJob.of(job)
    if not job.is_group():
        return rule_job
    members = [RuleJob.of(one) for one in job.jobs]
    most = {name: max(getattr(one, name) for one in members) for name in ("threads", "mem_mb")}
    return replace(rule_job, rule=job.groupid, **most)


def name_of(rule_job: RuleJob) -> str:
    """Return a job's name in the queue."""
    return ":".join([rule_job.rule, *(["_".join(rule_job.wildcards.values())] if rule_job.wildcards else [])])


def comment_of(job: Any, workdir: str) -> str:
    """Return the comment by which a later call finds a job that still runs: OURS, and digests.

    They are those of the working directory; of all that the job would make, from what, and how; and of each of its
    stages (rule and wildcards).
    """
    stages = sorted(job.jobs, key=_key) if job.is_group() else [job]
    made = [[_key(one), sorted(map(str, one.params)), sorted(map(str, one.output))] for one in stages]
    asked = [job.threads, *(job.resources.get(name) for name in ("gpu", "nodes"))]
    identity = _digest([made, _inputs(job), asked])
    return " ".join([OURS, folder_digest(workdir), identity, *(_digest(_key(one)) for one in stages)])


def folder_digest(workdir: str) -> str:
    """Return the digest of a working directory."""
    return _digest(workdir)


def _key(job: Any) -> str:
    return " ".join([job.rule.name, *(f"{name}={value}" for name, value in sorted(job.wildcards_dict.items()))])


def _inputs(job: Any) -> list[list[Any]]:
    """Return a job's input files, with the times of those that exist."""
    files: Sequence[str] = sorted(map(str, job.input))
    return [[file, Path(file).lstat().st_mtime_ns if Path(file).exists() else None] for file in files]


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
