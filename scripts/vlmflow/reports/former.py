"""The former trainings of a run, from its run folders: in what each differs from the present one, what it came to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.differing import Differences, asked, differing
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import printable
from vlmflow.in_trainer.messages import new_events
from vlmflow.supervisor.accounts import TrainingReport
from vlmflow.supervisor.progress import Newest
from vlmflow.supervisor.run_folder import JOB, RunFolder

RUN_FOLDER = re.compile(r"[0-9a-f]{16}(\.refused-\d+)?")
"""A run folder's name: the digest of its training, with a number if it was set aside."""

ROWS, BASE = "rows and pictures", "base model"
"""The inputs of a training whose digests are compared, as its settings are."""


class _Digest(msgspec.Struct):
    digest: str


class Job(msgspec.Struct):
    """What a training is bound to: the part of its `job.json` (`swift.arguments.Training.describe`) that differs."""

    data: _Digest
    model: _Digest
    processes: int
    device: str
    settings: dict[str, Any]
    nodes: int = 1
    tuner: str = "lora"
    strategy: str = "ddp"
    deepspeed: dict[str, Any] | None = None

    def made_with(self, steps: int) -> dict[str, Any]:
        """Return its settings by dotted key (`asked`), with the digests of its inputs. steps: its target."""
        of_run = {key: getattr(self, key) for key in ("device", "tuner", "strategy", "deepspeed")}
        ranks = {"processes": self.nodes * self.processes}
        return asked(self.settings, of_run | ranks, steps) | {ROWS: self.data.digest, BASE: self.model.digest}


def settings_of(report: TrainingReport) -> dict[str, Any]:
    """Return the settings of a finished training by dotted key (`asked`)."""
    device = "cpu" if report.device == "cpu" else "cuda"  # the report may have a GPU's name
    of_run = {"tuner": report.tuner, "strategy": report.strategy, "deepspeed": report.deepspeed}
    return asked(report.settings, {"device": device, **of_run, "processes": report.world_size}, report.target)


@dataclass(frozen=True)
class FormerTraining:
    """A training of a run that is not the present one. folder: its run folder. differs: in what, for people.

    came_to: its steps, and its lowest validation loss, for people.
    """

    folder: Path
    differs: str
    came_to: str

    def __str__(self) -> str:
        return f"{self.differs}; {self.came_to}"


def former_trainings(stage: Path, present: TrainingReport | None) -> list[FormerTraining]:
    """Return the former trainings of a run, the newest first.

    stage: the folder of its run folders, full or smoke (stores.runs/RUN/full). present: the report of the finished
    training; None: the training that began last is the present one.
    """
    folders = [place for place in stage.glob("*/") if RUN_FOLDER.fullmatch(place.name) and (place / JOB).is_file()]
    folders.sort(key=lambda place: (place / JOB).stat().st_mtime_ns, reverse=True)
    if present:
        inputs = {ROWS: present.digests.data, BASE: present.digests.model}
        return [_former(place, settings_of(present) | inputs) for place in folders if place.name != present.digests.job]
    if not folders:
        return []
    try:
        now = read_account(folders[0] / JOB, Job).made_with(_newest(folders[0]).target)
    except VlmflowError as error:
        unread = printable(f"not compared: {error.cause}")
        return [FormerTraining(place, unread, _came_to(_newest(place))) for place in folders[1:]]
    return [_former(place, now) for place in folders[1:]]


def _former(folder: Path, present: Mapping[str, Any]) -> FormerTraining:
    newest = _newest(folder)
    try:
        differs = differing(read_account(folder / JOB, Job).made_with(newest.target), present)
    except VlmflowError as error:
        return FormerTraining(folder, printable(f"not compared: {error.cause}"), _came_to(newest))
    aside = "set aside, because its input changed" if "." in folder.name else ""
    told = "; ".join(filter(None, [aside, _in_words(differs)]))
    return FormerTraining(folder, printable(told or "the same settings and rows"), _came_to(newest))


def _in_words(differs: Differences) -> str:
    told = (
        f"other {key}" if key in (ROWS, BASE) else f"{key} {was} (now {now})" for key, (was, now) in differs.items()
    )
    return ", ".join(told)


def _came_to(newest: Newest) -> str:
    if not newest.target:
        return "no step was made"
    steps = f"{newest.step:,} of {newest.target:,} steps"
    losses = {step: loss for step, loss in newest.eval_losses.items() if loss == loss}  # NaN is not lowest
    if not losses:
        return f"{steps}, no validation loss"
    step = min(losses, key=lambda step: losses[step])
    return f"{steps}, lowest validation loss {losses[step]:.3f}, at step {step:,}"


def _newest(folder: Path) -> Newest:
    progress = RunFolder(folder).progress
    if not progress.is_file():
        return Newest()
    with progress.open("rb") as lines:
        return Newest.of(new_events(lines))
