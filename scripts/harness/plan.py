"""What is looked at while Snakemake plans, with -n as without: the targets, and what could not end well."""

import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from snakemake.io import get_wildcard_names, strip_wildcard_constraints
from snakemake.utils import available_cpu_count

from harness import stale_lock, staleness
from vlmflow.config.model import Config

TRAINING = ("train_smoke", "train_lora")
"""The rules that start `processes` trainers."""

SHIPPED_ROOT = "pictures"
"""The picture root of the data sets in config.yaml."""

LOOKING = ("fetch_images", "resolve_images")
"""The rules that look for pictures in a data set's roots."""


def install(workflow: Any, settings: Config) -> None:
    """Put our looks around Snakemake's own planning, which has no hook for them.

    They end the process; an exception would bring a traceback with it. Jobs run Snakemake too: nothing is to be done.
    """
    if not workflow.is_main_process:
        return
    build_dag = workflow._build_dag

    def look_and_build() -> None:
        stale_lock.clear(workflow)  # here, since Snakemake does not know before whether it only plans
        _refuse_unknown_targets(workflow, settings)
        look_at_code = staleness.install(workflow)
        build_dag()
        look_at_code()
        _refuse_trainers_without_cores(workflow, settings)
        _refuse_missing_roots(workflow, settings)
        if workflow.dryrun:
            _look_past_the_lock(workflow)

    workflow._build_dag = look_and_build


def _refuse_unknown_targets(workflow: Any, settings: Config) -> None:
    """Refuse a file that no rule makes, by the same look that Snakemake takes, with the nearest that one does.

    And a rule that makes a file for every name: Snakemake would say that it has wildcards.
    """
    for rule in workflow.dag.targetrules:
        if rule.has_wildcards():
            made = ", ".join(_known_targets([rule], settings)) or "what docs/outputs.md lists"
            sys.exit(f"{rule.name}: this is a rule, not a file\n  what to do: name a file that it makes: {made}")
    makers = workflow.dag.output_index.match_producers
    for file in sorted(workflow.dag.targetfiles):
        if makers(file):
            continue
        said = next((target for target in workflow.dag_settings.targets if str(file).endswith(target)), str(file))
        before = str(file).removesuffix(said)  # where a default storage keeps its files
        known = [target.removeprefix(before) for target in _known_targets(workflow.rules, settings) if makers(target)]
        near = difflib.get_close_matches(said, known, n=1)
        sys.exit(
            f"{said}: no rule makes this target{f'; nearest: {near[0]}' if near else ''}\n"
            f"  what to do: name one from docs/outputs.md; runs: {', '.join(settings.runs)}; data sets: "
            f"{', '.join(settings.datasets)}; those in your own file need --configfile FILE before the --"
        )


def _known_targets(rules: Iterable[Any], settings: Config) -> Iterator[str]:
    """Give every output of some rules whose name holds nothing but the configuration's names and the raw splits."""
    values: dict[str, Iterable[str]] = {
        "run": settings.runs,
        "model": settings.models,
        "dataset": settings.datasets,
        "split": ("train", "test"),
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
    if workflow.storage_registry.default_storage_provider is not None:
        return  # the jobs run elsewhere
    cores = available_cpu_count()
    for job in workflow.dag.needrun_jobs():
        if job.rule.name in TRAINING:
            run = settings.runs[job.wildcards.run]
            if run.device == "cpu" and run.processes > cores:
                sys.exit(
                    f"runs.{job.wildcards.run}.processes: {run.processes} trainers on device cpu, this machine has "
                    f"{cores} core(s)\n  what to do: set it to {cores} or less"
                )


def _refuse_missing_roots(workflow: Any, settings: Config) -> None:
    """Refuse to look for pictures on this machine in a folder that is not there.

    The shipped runs can be planned before there is any picture.
    """
    if workflow.storage_registry.default_storage_provider is not None:
        return  # the jobs run elsewhere
    for job in workflow.dag.needrun_jobs():
        if job.rule.name in LOOKING:
            dataset = job.wildcards.dataset
            for root in settings.datasets[dataset].image_roots:
                if not Path(root).expanduser().is_dir() and not (workflow.dryrun and root == SHIPPED_ROOT):
                    sys.exit(
                        f"datasets.{dataset}.image_roots: no folder {root}\n"
                        "  what to do: name the folders that hold the pictures under the paths in the rows"
                    )


def _look_past_the_lock(workflow: Any) -> None:
    """Say that another Snakemake is at work, in the place of Snakemake's own line, which calls the lock an error."""
    workflow.persistence.lock = nullcontext
    if stale_lock.is_held():
        print("Another Snakemake is running in this folder; this plan shows the state so far.", file=sys.stderr)
