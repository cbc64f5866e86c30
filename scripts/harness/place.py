"""Where the jobs of a call run: on this machine, or elsewhere, and by which executor."""

from collections.abc import Callable
from typing import Any

_named: list[str] = []
"""The executor that the call names; [] for this machine."""


def note_executor(plugin: Any, name: str) -> None:
    """Note that the call names the executor of a plugin, if it does.

    Snakemake learns of its executor only after it has read the rules, and with -n it keeps another one. But for the one
    that the call names it checks the settings, also with -n.
    """
    check: Callable[[Any], None] = plugin.validate_settings

    def note_and_check(settings: Any) -> None:
        _named[:] = [name]
        check(settings)

    plugin.validate_settings = note_and_check


def on_slurm() -> bool:
    """Return whether the call sends its jobs to Slurm. Its answer is known when Snakemake plans."""
    return _named == ["slurm"]


def jobs_leave(workflow: Any) -> bool:
    """Return whether jobs run on other machines, or this process is such a job. It is known when Snakemake plans."""
    in_storage = workflow.storage_settings.default_storage_provider is not None
    return bool(workflow.remote_exec or in_storage or on_slurm())
