"""Checks while Snakemake plans, with and without -n: unknown targets, and jobs that would fail."""

import difflib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from snakemake.io import get_wildcard_names, strip_wildcard_constraints
from snakemake.utils import available_cpu_count

from vlmflow.config.data_settings import RAW_SPLITS
from vlmflow.config.machine_needs import refuse_missing, refuse_missing_compiler, refuse_old_driver
from vlmflow.config.model import Config
from vlmflow.config.strategies import strategy_of
from vlmflow.core.errors import VlmflowError
from vlmflow.core.own_environment import python_of
from vlmflow.core.printable import counted
from vlmflow.harness import before_start, light_stages, patches, place, search_inputs, stale_lock, staleness
from vlmflow.harness.before_start import run_of
from vlmflow.harness.plan_notes import notes
from vlmflow.harness.temporary_folder import TRAINING, refuse_long_temporary_folder

SHIPPED_ROOT = "pictures"
"""The picture root of the data sets in config.yaml."""

SEARCHING = ("propose", "tell")
"""The rules that start the environment `search`."""

LOOKING = ("fetch_images", "resolve_images")
"""The rules that search for pictures in a data set's roots."""


def install(
    workflow: Any,
    settings: Config,
    refuse_elsewhere: Callable[[Any, Config], None],
    when_nothing_is_to_do: Callable[[], None],
) -> None:
    """Add our checks to Snakemake's own planning; also one for a call that has nothing to do.

    The checks end the process, because an exception would print a traceback. Jobs run Snakemake too; there this does
    nothing.
    """
    if not workflow.is_main_process:
        return

    def look_and_plan(plan: Callable[[], None]) -> None:
        stale_lock.clear(workflow)  # here, because only now Snakemake knows whether this is a dry run
        _refuse_unknown_targets(workflow, settings)
        search_inputs.ask_for_results(workflow, settings)
        if place.on_slurm():
            light_stages.arrange(workflow, settings)
        look_at_code = staleness.install(workflow)
        patches.compare_past_ancient_inputs(workflow.dag)
        plan()
        look_at_code()
        _refuse_a_long_temporary_folder(workflow)
        _refuse_trainers_without_cores(workflow, settings)
        _refuse_nodes_without_a_shared_volume(workflow, settings)
        _refuse_trainers_without_packages(workflow, settings)
        _refuse_missing_roots(workflow, settings)
        _refuse_a_missing_environment(workflow)
        refuse_elsewhere(workflow, settings)
        if workflow.dryrun:
            for line in settings.former_names:
                print(line, file=sys.stderr)
            _say_what_is_trained(workflow, settings)
            _say_who_is_at_work()
        elif workflow.executor_plugin and not len(workflow.dag):  # without: --dag, --report and their like
            when_nothing_is_to_do()
        elif workflow.executor_plugin and workflow.local_exec:
            before_start.share_gpus(workflow, settings)

    patches.around_planning(workflow, look_and_plan)


def _refuse_unknown_targets(workflow: Any, settings: Config) -> None:
    """Refuse a file that no rule makes, as Snakemake matches it, and suggest the nearest target.

    Refuse also a rule with wildcards as a target, with a clearer message than Snakemake's.
    """
    for rule in workflow.dag.targetrules:
        if rule.has_wildcards():
            made = ", ".join(_known_targets([rule], settings)) or "what docs/outputs.md lists"
            sys.exit(f"{rule.name}: this is a rule, not a file\n  what to do: use a file that it makes: {made}")
    makers = workflow.dag.output_index.match_producers
    for file in sorted(workflow.dag.targetfiles):
        if makers(file):
            continue
        said = next((target for target in workflow.dag_settings.targets if str(file).endswith(target)), str(file))
        before = str(file).removesuffix(said)  # the prefix of a default storage
        known = [target.removeprefix(before) for target in _known_targets(workflow.rules, settings) if makers(target)]
        nearest = difflib.get_close_matches(said, known, n=1)
        sys.exit(
            f"{said}: no rule makes this target{f'; nearest: {nearest[0]}' if nearest else ''}\n"
            f"  what to do: use one from docs/outputs.md; runs: {', '.join(settings.runs)}; data sets: "
            f"{', '.join(settings.datasets)}; for those in your own file, name it: CONFIG=FILE with "
            "make, else --configfile FILE before the --"
        )


def _known_targets(rules: Iterable[Any], settings: Config) -> Iterator[str]:
    """Yield every output of some rules whose wildcards are only the configuration's names and the raw splits."""
    values: dict[str, Iterable[str]] = {
        "run": settings.runs,
        "model": settings.models,
        "dataset": settings.datasets,
        "search": settings.search,
        "split": RAW_SPLITS,
    }
    for rule in rules:
        for output in rule.output:
            names = get_wildcard_names(str(output))
            if names <= set(values):
                pattern = strip_wildcard_constraints(str(output))
                for chosen in itertools.product(*(values[name] for name in names)):
                    yield pattern.format(**dict(zip(names, chosen, strict=True)))


def _refuse_trainers_without_cores(workflow: Any, settings: Config) -> None:
    """Refuse a planned training on this machine's CPU with more processes than cores."""
    if place.jobs_leave(workflow):
        return
    cores = available_cpu_count()
    for job in workflow.dag.needrun_jobs():
        if job.rule.name in TRAINING:
            name = run_of(settings, job)
            run = settings.runs[name]
            if run.device == "cpu" and run.ranks > cores:
                on_nodes = f" on {run.nodes} nodes" if run.nodes > 1 else ""
                sys.exit(
                    f"runs.{name}.processes: {run.ranks} trainers{on_nodes} on device cpu, this machine "
                    f"has {counted(cores, 'core')}\n  what to do: set {_less(name, run.nodes, cores)}"
                )


def _less(run: str, nodes: int, cores: int) -> str:
    """Return what to set so that a run's trainers fit on so many cores."""
    if nodes > cores:
        return f"runs.{run}.nodes to {cores} or less, and processes to 1"
    return f"it to {cores // nodes} or less"


def _refuse_nodes_without_a_shared_volume(workflow: Any, settings: Config) -> None:
    """Refuse a planned training on several nodes whose pods have no folder in common for its rows and its run."""
    if workflow.storage_registry.default_storage_provider is None:
        return  # all nodes are this machine
    places = {
        "remote-job-local-storage-prefix": workflow.storage_settings.remote_job_local_storage_prefix,
        "stores.runs": settings.stores.runs,
    }
    alone = [f"{key} is {place}" for key, place in places.items() if not Path(place or "").is_absolute()]
    for job in workflow.dag.needrun_jobs() if alone else ():
        if job.rule.name in TRAINING and (nodes := settings.runs[run_of(settings, job)].nodes) > 1:
            sys.exit(
                f"runs.{run_of(settings, job)}.nodes: {nodes} nodes need a volume that all of them see: "
                f"{', '.join(alone)}, which is in each pod alone\n  what to do: use the profile profiles/kubernetes "
                "or profiles/kubernetes-s3 with profiles/kubernetes/stores.yaml, or set nodes: 1"
            )


def _refuse_a_long_temporary_folder(workflow: Any) -> None:
    """Refuse jobs on this machine whose processes could make no sockets in its folder for temporary files."""
    if place.jobs_leave(workflow):
        return
    if any(job.rule.name in TRAINING for job in workflow.dag.needrun_jobs()):
        try:
            refuse_long_temporary_folder()
        except VlmflowError as error:
            sys.exit(str(error))


def _refuse_trainers_without_packages(workflow: Any, settings: Config) -> None:
    """Refuse a planned training for which this machine lacks a package, a compiler or a newer driver."""
    if place.jobs_leave(workflow):
        return
    for run in {run_of(settings, job) for job in workflow.dag.needrun_jobs() if job.rule.name in TRAINING}:
        try:
            if settings.runs[run].device == "cuda":
                refuse_old_driver()
            refuse_missing(settings.runs[run].train)
            refuse_missing_compiler(strategy_of(settings.runs[run].strategy, settings.runs[run].deepspeed))
        except VlmflowError as error:
            sys.exit(str(error).replace("runs.NAME", f"runs.{run}"))


def _refuse_a_missing_environment(workflow: Any) -> None:
    """Refuse a planned search on this machine without its environment: the stages before it may take hours.

    A tracker is told at the end of a run, and its failure fails nothing else: its missing environment is only reported.
    """
    if workflow.storage_registry.default_storage_provider is not None:
        return  # the jobs run elsewhere
    planned = {job.rule.name for job in workflow.dag.needrun_jobs()}
    if not planned.isdisjoint(SEARCHING):
        try:
            python_of("search")
        except VlmflowError as error:
            sys.exit(str(error))
    if "track" in planned:
        try:
            python_of("track")
        except VlmflowError as error:
            print(f"the rule track will fail, and nothing else: {error}", file=sys.stderr)


def _refuse_missing_roots(workflow: Any, settings: Config) -> None:
    """Refuse to search for pictures on this machine in a missing folder.

    A dry run of the shipped runs needs no pictures.
    """
    if workflow.storage_registry.default_storage_provider is not None:
        return  # the jobs run elsewhere
    for job in workflow.dag.needrun_jobs():
        if job.rule.name in LOOKING:
            dataset = job.wildcards.dataset
            for root in settings.raw_datasets[dataset].image_roots:
                if not Path(root).expanduser().is_dir() and not (workflow.dryrun and root == SHIPPED_ROOT):
                    sys.exit(
                        f"datasets.{dataset}.image_roots: no folder {root}\n"
                        "  what to do: set the folders below which the rows' picture paths exist"
                    )


def _say_what_is_trained(workflow: Any, settings: Config) -> None:
    """Print what earlier stages know about the runs that would be trained."""
    if workflow.storage_registry.default_storage_provider is not None:
        return  # their accounts are elsewhere
    planned = {run_of(settings, job) for job in workflow.dag.needrun_jobs() if job.rule.name in TRAINING}
    for line in notes(settings, sorted(planned), Path()):
        print(line, file=sys.stderr)


def _say_who_is_at_work() -> None:
    """Print that another Snakemake is running; Snakemake's own line calls the lock an error (see `screen`)."""
    if stale_lock.is_held():
        print("Another Snakemake is running in this folder; this plan shows the state so far.", file=sys.stderr)
