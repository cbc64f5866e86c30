"""The jobs of a run, as Snakemake plans them from the rule files."""

import contextlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings, StorageSettings

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
    when_read: Callable[[], object] = lambda: None,
) -> list[Read]:
    """Return what `read` returns of each of Snakemake's jobs that make `target` from nothing; a group is one job.

    files: configuration files over config.yaml, in their order. folder: the working directory. when_read: called
    between the reading of the rules and the plan.

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
                when_read()
                # The API's own views of a plan (`summary`, `printdag`) cut all threads to one.
                plan = workflow._workflow
                plan._prepare_dag(forceall=True, ignore_incomplete=True, lock_warn_only=True)
                plan._build_dag()
                return [read(job) for job in plan.dag.get_jobs_or_groups()]
        except SystemExit as refusal:
            raise VlmflowError(str(refusal), "fix it; snakemake -n shows the same message") from None
