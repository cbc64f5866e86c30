"""The jobs of a run, as Snakemake plans them from the rule files, and what they fetch."""

import contextlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    ExecutionSettings,
    OutputSettings,
    ResourceSettings,
    StorageSettings,
)

from vlmflow.config.model import Config
from vlmflow.config.source import HubSource, parse_source
from vlmflow.core.errors import VlmflowError

Read = TypeVar("Read")

MANY = 10**6
"""Cores for planning: a rule's threads must not be cut to this machine's."""


def planned_jobs(
    snakefile: Path,
    files: Iterable[Path],
    target: str,
    folder: Path,
    resources: ResourceSettings,
    storage: StorageSettings,
    read: Callable[[Any], Read],
    executor: tuple[Any, Any] | None = None,
) -> list[Read]:
    """Return what `read` returns of each of Snakemake's jobs that make `target` from nothing; a group is one job.

    files: configuration files over config.yaml, in their order. folder: the working directory. executor: the
    plugin, with its settings, that runs the jobs; None for this machine.

    Raises VlmflowError with Snakemake's message if it refuses the workflow or its configuration.
    """
    said = io.StringIO()
    settings = OutputSettings(quiet={Quietness.ALL})
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            with SnakemakeApi(settings) as api:
                workflow = api.workflow(
                    resources,
                    ConfigSettings(configfiles=[file.absolute() for file in files]),
                    storage,
                    snakefile=snakefile,
                    workdir=folder,
                )
                workflow.dag(DAGSettings(targets={target}))
                # The API's own views of a plan (`summary`, `printdag`) cut all threads to one.
                plan = workflow._workflow
                if executor is not None:
                    plan.execution_settings = ExecutionSettings()
                    plan._executor_plugin, settings_of_it = executor
                    plan._executor_plugin.validate_settings(settings_of_it)
                plan._prepare_dag(forceall=True, ignore_incomplete=True, lock_warn_only=True)
                plan._build_dag()
                plan.dag.update_groups()
                return [read(job) for job in plan.dag.get_jobs_or_groups()]
        except SystemExit as refusal:
            cause, _, step = str(refusal).partition("\n  what to do: ")
            raise VlmflowError(cause, step or "fix it; snakemake -n shows the same message") from None


def hub_sources(settings: Config, runs: list[str]) -> list[str]:
    """Return the addresses that some runs fetch from the hub, sorted."""
    models = [settings.models[settings.runs[run].model].source for run in runs]
    files = [address for run in runs for address in settings.datasets[settings.runs[run].dataset].all_addresses]
    return sorted({source for source in [*models, *files] if isinstance(parse_source(source), HubSource)})
