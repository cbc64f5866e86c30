"""Print a table of what a Slurm cluster has and lacks for the configuration's runs; exit code 0 if it is ready.

It runs on a login node, plans the runs with a profile, and submits a job of a few seconds to each partition of theirs.
"""

import argparse
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import ENDPOINT
from snakemake import cli
from snakemake.settings.types import ResourceSettings, StorageSettings
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow import CHECKOUT
from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.findings import Finding, report
from vlmflow.remote.planned_jobs import MANY, hub_sources, planned_jobs
from vlmflow.remote.slurm.partitions import Asked, Partition, accounts, partitions, why_in_none
from vlmflow.remote.slurm.probe import Probe, check_answer, folders_of
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm
from vlmflow.remote.slurm.request import rule_job_of, sbatch_words
from vlmflow.remote.slurm.site import (
    check_accounting,
    check_accounts,
    check_controller,
    check_partition,
    check_preemption,
    check_run,
    check_settings,
    check_time,
    read_config,
)

PROFILE = CHECKOUT / "profiles/slurm"

FETCHING = "fetch"
"""In the names of rules that fetch from the internet, and of the group that they may share."""


def main(files: list[Path], profile: str, runs: list[str], folder: Path, as_json_text: bool, patience: float) -> int:
    """Print the findings; returns the exit code."""
    options = read_profile(profile, files)
    layers = [CHECKOUT / "config.yaml", *options.configfile]
    settings = check_config(read_layers(layers), layers)
    unknown = [run for run in runs if run not in settings.runs]
    if unknown:
        raise VlmflowError(f"--run: unknown run {unknown[0]}", f"use one of {', '.join(settings.runs)}")
    if not folder.is_dir():
        raise VlmflowError(f"--directory {folder}: no such folder", "name the working directory of your runs")
    refuse_without_slurm()
    return report(look(options, settings, runs or list(settings.runs), folder, patience), as_json_text)


def read_profile(profile: str, files: list[Path]) -> Any:
    """Return the options of a call of Snakemake with a profile and configuration files, as Snakemake reads them.

    Raises VlmflowError if Snakemake refuses them, or they run no jobs on Slurm.
    """
    words = ["--snakefile", str(CHECKOUT / "Snakefile"), "--profile", profile]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            _, options = cli.parse_args([*words, *(["--configfile", *map(str, files)] if files else [])])
    except SystemExit:
        raise VlmflowError(
            f"--profile {profile}: {said.getvalue().strip().splitlines()[-1]}",
            "name your copy of the folder profiles/slurm by --profile",
        ) from None
    if options.executor != "slurm":
        raise VlmflowError(
            f"--profile {profile}: its executor is {options.executor or 'none'}", "name a copy of profiles/slurm"
        )
    options.configfile = [Path(file) for file in options.configfile or []]
    return options


@dataclass(frozen=True)
class PlannedJob:
    """A job of Slurm. request: what it asks Slurm for. words: the call of sbatch that submits it."""

    request: Asked
    words: tuple[str, ...]


def planned(options: Any, settings: Config, run: str, folder: Path) -> list[PlannedJob]:
    """Return the jobs of Slurm that make a run from nothing; stages that run here are none of them."""
    plugin = ExecutorPluginRegistry().get_plugin("slurm")
    own = plugin.get_settings(options)
    resources = ResourceSettings(
        cores=MANY,
        nodes=1,
        max_threads=options.max_threads,
        default_resources=options.default_resources,
        overwrite_resources=options.set_resources,
        overwrite_threads=options.set_threads,
    )

    def read(job: Any) -> PlannedJob | None:
        if job.is_local:
            return None
        request, model = Asked.of(job, settings.slurm.gpu_model), settings.slurm.gpu_model
        words = sbatch_words(
            job,
            rule_job_of(job),
            "",
            gpus_by=settings.slurm.gpus,
            gpu_model=model,
            minutes=None if request.warning else request.minutes,
            log=Path(os.devnull),
            workdir=str(folder),
            account=f"-A {shlex.quote(request.account)}" if request.account else "",
            partition=f"-p {shlex.quote(','.join(request.partitions))}" if request.partitions else "",
            settings=own,
        )
        return PlannedJob(request, tuple(words))

    snakefile, target = CHECKOUT / "Snakefile", f"merged/{run}"
    storage, executor = StorageSettings(), (plugin, own)
    found = planned_jobs(snakefile, options.configfile, target, folder, resources, storage, read, executor)
    return [job for job in found if job is not None]


def check_submission(jobs: Iterable[PlannedJob]) -> Finding:
    """Let sbatch judge jobs without submitting them: accounts, limits of users, and how GPUs are asked for."""
    refusals: dict[str, list[str]] = {}
    for job in {job.words: job for job in jobs}.values():
        try:
            ask(*job.words, "--test-only", script="#!/bin/sh\n")
        except SlurmError as error:
            refusals.setdefault(error.cause, []).append(job.request.rule)
    if refusals:
        found = "; ".join(f"{', '.join(rules)}: {said}" for said, rules in refusals.items())
        step = "slurm.gpus says how GPUs are asked for; account, qos and constraint are resources in your profile"
        return Finding("sbatch --test-only", "fail", found, step)
    return Finding("sbatch --test-only", "ok", "Slurm would take every job of these runs")


def look(options: Any, settings: Config, runs: list[str], folder: Path, patience: float) -> Iterator[Finding]:
    """Yield each check as soon as it is made: first what Slurm tells, then what jobs see."""
    try:
        config, found = read_config(ask("scontrol", "show", "config")), partitions()
    except SlurmError as error:
        yield Finding("Slurm", "fail", error.cause, "`scontrol ping` must say UP; ask the site's administrators")
        return
    of_user = accounts()
    jobs = {run: planned(options, settings, run, folder) for run in runs}
    plans = {run: [job.request for job in several] for run, several in jobs.items()}
    default = tuple(name for name, one in found.items() if one.is_default)
    used: dict[str, list[Asked]] = {}
    for one in (one for plan in plans.values() for one in plan):
        for name in one.partitions or default:
            if name in found:
                used.setdefault(name, []).append(one)
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    yield check_controller(config)
    yield check_accounting(_fault_of_sacct())
    yield check_accounts([one for plan in plans.values() for one in plan], of_user, enforced)
    for name in used:
        yield check_partition(found[name])
    for run, plan in plans.items():
        yield from check_run(run, plan, found, of_user)
    fitting = [job for several in jobs.values() for job in several if why_in_none(job.request, found, of_user) is None]
    yield check_submission(fitting)
    yield from check_settings(config)
    for name, requests in used.items():
        savers = [one for one in requests if one.warning]
        yield from (check_time(one, found[name]) for one in savers)
        if savers:
            yield check_preemption(found[name], config, max(one.warning for one in savers))
    hub = ENDPOINT if hub_sources(settings, runs) else ""
    yield from _look_inside(
        [(found[name], requests) for name, requests in used.items()], settings, folder, hub, patience
    )


def _fault_of_sacct() -> str | None:
    try:
        ask("sacct", "-X", "-n", "-P", "-o", "JobID")
    except SlurmError as error:
        return error.cause
    return None


def _look_inside(
    used: list[tuple[Partition, list[Asked]]], settings: Config, folder: Path, hub: str, patience: float
) -> Iterator[Finding]:
    """Look from jobs, one in each partition; all are removed at the end, also after Ctrl-C."""
    names = folders_of(folder, dict(settings.stores))
    with contextlib.ExitStack() as started:
        probes = []
        for partition, requests in used:
            asked = hub if any(FETCHING in one.rule for one in requests) else ""
            account = next((one.account for one in requests if one.account), None)
            probes.append((started.enter_context(Probe(partition, account, folder, list(names), asked)), asked))
        for probe, asked in probes:
            try:
                yield from check_answer(probe.partition.name, probe.answer(patience), names, probe.nodes, asked)
            except SlurmError as error:
                yield Finding(f"jobs in {probe.partition.name}", "fail", error.cause, "try again when Slurm answers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make doctor ON=slurm", description=__doc__)
    parser.add_argument(
        "--configfile", type=Path, nargs="+", default=[], metavar="FILE", help="settings over config.yaml"
    )
    parser.add_argument("--profile", default=str(PROFILE), help="yours, for this site")
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="check these runs alone")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="FOLDER", help="the working directory, as of snakemake"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--patience", type=float, default=180, metavar="SECONDS", help="wait this long for a job to start"
    )
    given = parser.parse_args()
    try:
        folder = given.directory.resolve()
        sys.exit(main(given.configfile, given.profile, given.run, folder, given.json, given.patience))
    except VlmflowError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
