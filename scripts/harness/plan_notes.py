"""What a plan says about the runs that it would train, where earlier stages have left an account that tells it."""

from collections.abc import Iterable
from pathlib import Path

from vlmflow.config.model import Config
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.stats import Stats
from vlmflow.rows.trained_text import in_words


def notes(settings: Config, runs: Iterable[str], folder: Path) -> list[str]:
    """Return the lines on some runs, those on the same data set once.

    folder: the working directory. A data set without an account that can be read has no line: its stages will speak.
    """
    lines: dict[str, None] = {}
    for run in runs:
        dataset = settings.runs[run].dataset
        try:
            stats = read_account(folder / "data" / dataset / "stats.json", Stats)
        except (OSError, VlmflowError):
            continue
        if said := in_words(stats.trained_characters, dataset, settings.good_run(dataset)):
            lines[f"data set {dataset}: {said}"] = None
    return list(lines)
