"""A table of what a Slurm cluster has and lacks for the configuration's runs.

It runs on a login node, plans the runs with a profile, and submits a job of a few seconds to each partition of theirs.
"""

import contextlib
import io
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.constants import ENDPOINT
from snakemake import cli
from snakemake.settings.types import ResourceSettings, StorageSettings
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow.remote import doctor
from vlmflow.remote.doctor import Finding
from vlmflow.remote.library import CHECKOUT, Config, VlmflowError
from vlmflow.remote.slurm import site
from vlmflow.remote.slurm.partitions import Partition, accounts, named_by, partitions, why_in_none
from vlmflow.remote.slurm.probe import Probe, check_nodes, folders_of
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm
from vlmflow.remote.slurm.request import Request, rule_job_of, sbatch_words

PROFILE = CHECKOUT / "profiles/slurm"

FETCHING = "fetch"
"""In the names of rules that fetch from the internet, and of the group that they may share."""

PlannedJob = tuple[Request, tuple[str, ...]]
"""What a job asks Slurm for, and the call of sbatch that submits it."""


def main(files: list[Path], runs: list[str], profile: str, folder: Path, patience: float, as_json: bool) -> int:
    """Print the findings; returns the exit code.

    files: configurations over config.yaml. runs: those to check; []: all. profile: of Snakemake; "": profiles/slurm.
    folder: the working directory of the runs. patience: seconds to wait for a job to start.
    """
    options, folder = read_profile(profile or str(PROFILE), files), folder.resolve()
    settings, runs = doctor.settings_and_runs([CHECKOUT / "config.yaml", *options.configfile], runs)
    if not folder.is_dir():
        raise VlmflowError(f"--directory {folder}: no such folder", "name the working directory of your runs")
    refuse_without_slurm()
    return doctor.report(look(options, settings, runs, folder, patience), as_json)


def read_profile(profile: str, files: list[Path]) -> Any:
    """Return the options of a call of Snakemake with a profile and configuration files, as Snakemake reads them.

    Raises VlmflowError if Snakemake refuses them, or they run no jobs on Slurm.
    """
    words = ["--snakefile", str(CHECKOUT / "Snakefile"), "--profile", profile]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            _, options = cli.parse_args([*words, *(["--configfile", *map(str, files)] if files else [])])
    except SystemExit:
        raise VlmflowError(
            f"--profile {profile}: {output.getvalue().strip().splitlines()[-1]}",
            "name your copy of the folder profiles/slurm by --profile",
        ) from None
    if options.executor != "slurm":
        raise VlmflowError(
            f"--profile {profile}: its executor is {options.executor or 'none'}", "name a copy of profiles/slurm"
        )
    options.configfile = [Path(file) for file in options.configfile or []]
    return options


def planned(options: Any, settings: Config, run: str, folder: Path) -> list[PlannedJob]:
    """Return the jobs of Slurm that make a run from nothing; stages that run here are none of them."""
    plugin = ExecutorPluginRegistry().get_plugin("slurm")
    own = plugin.get_settings(options)
    resources = ResourceSettings(
        cores=doctor.MANY,
        nodes=1,
        max_threads=options.max_threads,
        default_resources=options.default_resources,
        overwrite_resources=options.set_resources,
        overwrite_threads=options.set_threads,
    )

    def read(job: Any) -> PlannedJob | None:
        if job.is_local:
            return None
        request = Request.of(job, settings.slurm.gpu_model)
        words = sbatch_words(
            job,
            rule_job_of(job),
            "",
            slurm=settings.slurm,
            minutes=None if request.warning else request.runtime or None,
            log=Path(os.devnull),
            workdir=str(folder),
            partition=f"-p {shlex.quote(','.join(request.partitions))}" if request.partitions else "",
            settings=own,
        )
        return request, tuple(words)

    jobs = doctor.planned_jobs(run, options.configfile, folder, resources, StorageSettings(), read, (plugin, own))
    return [job for job in jobs if job is not None]


def look(options: Any, settings: Config, runs: list[str], folder: Path, patience: float) -> Iterator[Finding]:
    """Yield each check as soon as it is made: first what Slurm tells, then what jobs see."""
    try:
        config, of_site = site.read_config(ask("scontrol", "show", "config")), partitions()
    except SlurmError as error:
        yield Finding("Slurm", "fail", error.cause, "`scontrol ping` must say UP; ask the site's administrators")
        return
    of_user = accounts()
    jobs = {run: planned(options, settings, run, folder) for run in runs}
    requests = [request for several in jobs.values() for request, _ in several]
    used: dict[str, list[Request]] = {}
    for request in requests:
        for name in named_by(request, of_site):
            if name in of_site:
                used.setdefault(name, []).append(request)
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    yield site.check_controller(config)
    yield site.check_accounting()
    yield site.check_accounts(requests, of_user, enforced)
    for name in used:
        yield site.check_partition(of_site[name])
    for run, several in jobs.items():
        yield from site.check_run(run, [request for request, _ in several], of_site, of_user)
    yield check_submission(
        job for several in jobs.values() for job in several if why_in_none(job[0], of_site, of_user) is None
    )
    yield from site.check_settings(config)
    for name, of_partition in used.items():
        savers = [request for request in of_partition if request.warning]
        yield from (site.check_time(request, of_site[name]) for request in savers)
        if savers:
            yield site.check_preemption(of_site[name], config, max(request.warning for request in savers))
    hub = ENDPOINT if doctor.hub_sources(settings, runs) else ""
    yield from _look_inside([(of_site[name], used[name]) for name in used], settings, folder, hub, patience)


def check_submission(jobs: Iterable[PlannedJob]) -> Finding:
    """Let sbatch judge jobs without submitting them: accounts, limits of users, and how GPUs are asked for."""
    refusals: dict[str, list[str]] = {}
    for words, request in {words: request for request, words in jobs}.items():
        try:
            ask(*words, "--test-only", script="#!/bin/sh\n")
        except SlurmError as error:
            refusals.setdefault(error.cause, []).append(request.rule)
    if refusals:
        detail = "; ".join(f"{', '.join(rules)}: {message}" for message, rules in refusals.items())
        step = "slurm.gpus says how GPUs are asked for; account, qos and constraint are resources in your profile"
        return Finding("sbatch --test-only", "fail", detail, step)
    return Finding("sbatch --test-only", "ok", "Slurm would take every job of these runs")


def _look_inside(
    used: list[tuple[Partition, list[Request]]], settings: Config, folder: Path, hub: str, patience: float
) -> Iterator[Finding]:
    """Look from jobs, one in each partition; all are removed at the end, also after Ctrl-C."""
    names = folders_of(folder, dict(settings.stores))
    with contextlib.ExitStack() as started:
        probes = []
        for partition, requests in used:
            address = hub if any(FETCHING in request.rule for request in requests) else ""
            account = next((request.account for request in requests if request.account), None)
            probes.append(started.enter_context(Probe(partition, account, folder, list(names), address)))
        for probe in probes:
            try:
                report = probe.answer(patience)
                if isinstance(report, Finding):
                    yield report
                else:
                    yield from check_nodes(probe.partition.name, report, names, probe.nodes, probe.hub)
            except SlurmError as error:
                yield Finding(f"jobs in {probe.partition.name}", "fail", error.cause, "try again when Slurm answers")
