"""What a plan says about the runs that it would train, where earlier stages have left an account that tells it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from vlmflow.config.model import Config
from vlmflow.config.run_settings import RunSettings
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.accounts import FittedRows
from vlmflow.lengths.fitted import ACCOUNT
from vlmflow.lengths.steps import Steps, evaluations_of, schedule_in_words
from vlmflow.rows.stats import Stats
from vlmflow.rows.trained_text import in_words, is_mixed

Kind = TypeVar("Kind")


def notes(settings: Config, runs: Iterable[str], folder: Path) -> list[str]:
    """Return the lines on some runs, those on the same data set once.

    folder: the working directory. What no readable account tells is not said: the stages that make it will speak.
    """
    lines: dict[str, None] = {}
    for name in runs:
        run = settings.runs[name]
        if said := settings.models[run.model].untested:
            lines[f"models.{run.model}.{said}"] = None
        stats = _account(folder / "data" / run.dataset / "stats.json", Stats)
        if stats and is_mixed(trained := stats.trained_characters):
            lines[f"data set {run.dataset}: {in_words(trained, stats.scored, settings.good_run(run.dataset))}"] = None
        fitted = _account(folder / "fitted" / name / ACCOUNT, FittedRows)
        rows = fitted.train.lengths.rows if fitted else stats.examples["train"] if stats else 0
        if rows:
            lines[f"run {name}: {_schedule(run, rows)}"] = None
    return list(lines)


def _schedule(run: RunSettings, rows: int) -> str:
    steps = Steps.of(rows, run.train, run.ranks).total
    return schedule_in_words(steps, evaluations_of(steps, run.train))


def _account(file: Path, kind: type[Kind]) -> Kind | None:
    try:
        return read_account(file, kind)
    except (OSError, VlmflowError):
        return None
