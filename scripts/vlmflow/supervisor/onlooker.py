"""Who looks at a training while it runs."""

from collections.abc import Callable
from importlib import import_module

from vlmflow.config.run_settings import TrainSettings
from vlmflow.supervisor.run_folder import RunFolder

Onlooker = Callable[[RunFolder, bool], None]
"""Called several times a second while trainers run, with their run folder and True; with False when they ended."""

PAGE = "vlmflow.reports.live_page"
"""The module that writes a run's page. It is loaded by its name: as an import it would be part of the digest of what
trains (harness/code_digest.py), and a new layout is no reason to train again."""


def nobody(folder: RunFolder, runs: bool) -> None:
    """Look at nothing."""


def page_of(run: str, stage: str, settings: TrainSettings) -> Onlooker:
    """Return the onlooker that writes the page `run.html` into the run folder.

    run: the run's name. stage: "smoke" or "full". settings: those of the training.
    """
    onlooker: Onlooker = import_module(PAGE).LivePage(run, stage, settings).refresh
    return onlooker
