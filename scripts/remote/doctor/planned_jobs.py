"""What the rules of a run request, as Snakemake computes it from the rule files before it runs."""

import contextlib
import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings, StorageSettings

from remote.doctor.needs import Ask
from vlmflow.core.errors import VlmflowError

MANY = 10**6
"""Cores for planning: a rule's threads must not be cut to this machine's."""


def planned_asks(snakefile: Path, files: Iterable[Path], target: str, max_threads: int | None = None) -> list[Ask]:
    """Return what the rules request that make `target` from nothing, each different request once.

    files: configuration files over config.yaml, in their order. max_threads: as Snakemake's --max-threads.

    Raises VlmflowError with Snakemake's message if it refuses the workflow or its configuration.
    """
    said = io.StringIO()
    settings = OutputSettings(quiet={Quietness.ALL})
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            with SnakemakeApi(settings) as api:
                workflow = api.workflow(
                    ResourceSettings(cores=MANY, nodes=1, max_threads=max_threads),
                    ConfigSettings(configfiles=[file.absolute() for file in files]),
                    # As on a cluster: local sources may be on volumes that only pods have.
                    StorageSettings(default_storage_provider="fs", default_storage_prefix=f"{empty}/targets"),
                    snakefile=snakefile,
                    workdir=Path(empty),
                )
                workflow.dag(DAGSettings(targets={target}))
                # The API's own views of a plan (`summary`, `printdag`) cut all threads to one.
                plan = workflow._workflow
                plan._prepare_dag(forceall=False, ignore_incomplete=True, lock_warn_only=True)
                plan._build_dag()
                asks = {_ask(job) for job in plan.dag.jobs}
        except SystemExit as refusal:
            raise VlmflowError(str(refusal), "fix it; snakemake -n shows the same message") from None
    return sorted(asks, key=lambda ask: (ask.rule, ask.mem_mb))


def _ask(job: Any) -> Ask:
    amounts = job.resources
    return Ask(
        job.rule.name,
        int(job.threads),
        int(amounts.get("mem_mb") or 0),
        int(amounts.get("disk_mb") or 0),
        int(amounts.get("gpu") or 0),
        str(amounts.get("pod_template") or "default"),
        int(amounts.get("nodes") or 1),
    )
