"""Where the jobs of a call run: on this machine, or elsewhere, and by which executor."""

from typing import Any

IN_SLURM = "VLMFLOW_SLURM_ENDS"
"""The variable that only jobs of the executor for Slurm have (`remote.slurm.in_job`)."""

_named: list[str] = []
"""The executor that the call names; [] for this machine."""


def note_executor(name: str) -> None:
    """Note the executor that the call names."""
    _named[:] = [name]


def on_slurm() -> bool:
    """Return whether the call sends its jobs to Slurm. Its answer is known when Snakemake plans."""
    return _named == ["slurm"]


def jobs_leave(workflow: Any) -> bool:
    """Return whether jobs run on other machines, or this process is such a job. It is known when Snakemake plans."""
    in_storage = workflow.storage_settings.default_storage_provider is not None
    return bool(workflow.remote_exec or in_storage or on_slurm())
