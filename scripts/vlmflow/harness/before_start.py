"""Refuses, before the first job, what would fail later, and limits jobs to this machine's GPUs; not with -n."""

import sys
from typing import Any

from vlmflow.config.model import Config
from vlmflow.config.pins import revision_of
from vlmflow.core.printable import counted
from vlmflow.harness import gpu_share


def run_of(settings: Config, job: Any) -> str:
    """Return the run that a job trains: its wildcard, or that of its search."""
    search = job.wildcards.get("search")
    return settings.search[search].run if search else str(job.wildcards.run)


def refuse_unpinned(workflow: Any, settings: Config) -> None:
    """End the process if the fetch of a model would fail, which may come hours later: it has no revision in pins.yaml.

    An exception would print a traceback of the Snakefile.
    """
    jobs = workflow.dag.needrun_jobs()
    models = {job.wildcards.model for job in jobs if job.name in ("fetch_model", "fetch_model_files")}
    for model in sorted(models):
        source = settings.models[model].source
        if source.startswith("hf://") and revision_of(source) is None:
            sys.exit(
                f"models.{model}.source: {source} has no revision in pins.yaml\n  what to do: run `make pins` and "
                f"review the table (a new source needs a row `{source}:` first), or write the commit into the address "
                "(…/NAME@COMMIT)"
            )


def share_gpus(workflow: Any, settings: Config) -> None:
    """End the process if a job needs more GPUs than the machine has, and make jobs wait for free ones (`gpu_share`).

    Snakemake limits only resources that --resources or a profile names: two runs would start on the same GPUs. Call it
    when there is a plan, and no scheduler yet.
    """
    most = max(workflow.dag.needrun_jobs(), key=_gpus)
    wanted = _gpus(most)
    present = len(gpu_share.gpus()) if wanted else 0
    if wanted > present:
        run = run_of(settings, most)
        sys.exit(
            f"rule {most.name} needs {counted(wanted, 'GPU')}, this machine has {present}\n  what to do: train on the "
            f"CPU (runs.{run}.device: cpu, for a tiny model: README.md), on fewer GPUs (runs.{run}.processes), or on a "
            "cluster (--executor kubernetes, docs/kubernetes.md)"
        )
    if wanted and "gpu" not in workflow.global_resources:
        workflow.register_resource("gpu", present)


def _gpus(job: Any) -> int:
    return int(job.resources.get("gpu", 0))
