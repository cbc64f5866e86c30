"""Prints at the end of the process what the runs of a call are: rows, losses, gate, verdict, pages, weights."""

import atexit
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vlmflow.config.model import Config
from vlmflow.core.printable import printable_lines

CopyFromStorage = Callable[[Any, Iterable[tuple[str, str]], Path], None]
"""Copies from the storage of a workflow those of some targets (`summary.files_of`) that exist into a folder."""


def show_at_the_end(workflow: Any, settings: Config, copy_from_storage: CopyFromStorage) -> None:
    """Print the summary of every run whose weights the call asks for, or needs; what fails here fails no run."""
    runs = sorted({job.wildcards.run for job in workflow.dag.jobs if job.rule.name == "publish_merged"})
    texts = []
    for run in runs:
        try:
            texts.append(_summary(workflow, run, settings.runs[run].dataset, copy_from_storage))
        except Exception as error:  # whatever an account of another version holds, or the storage says
            texts.append(f"\n{run} is done. Its summary cannot be shown: {type(error).__name__}: {error}\n")
    if texts:
        atexit.register(print, printable_lines("".join(texts)), flush=True)


def _summary(workflow: Any, run: str, dataset: str, copy_from_storage: CopyFromStorage) -> str:
    from vlmflow.reports.summary import files_of, summary  # takes time, which plans and pods do not need

    prefix = os.path.expandvars(workflow.storage_settings.default_storage_prefix or "")
    if workflow.storage_settings.default_storage_provider is None:
        here, asked_in = Path.cwd(), Path(workflow.rundir)
        shown = here.relative_to(asked_in) if here.is_relative_to(asked_in) else here
        return summary(Path(), run, dataset, "" if shown == Path() else f"{shown}/")
    with tempfile.TemporaryDirectory(prefix="vlmflow-summary-") as copies:
        copy_from_storage(workflow, files_of(run, dataset), Path(copies))
        return summary(Path(copies), run, dataset, f"{prefix}/").replace(copies, prefix)
