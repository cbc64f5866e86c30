"""The course of a training, from its events: the newest figures, and the curves of a run's page.

The former trainings of a run, from its run folders: in what each differs from the present one, what it came to.

What a run is trained from, for pages: its model, its data set, its own settings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.config.run_blocks import Differences, TrainBlock, asked, differing, own_settings
from vlmflow.config.run_settings import RunSettings
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, printable
from vlmflow.in_trainer.messages import Begin, Event, Log, new_events
from vlmflow.reports.charts import Curve, LineChart, line_chart
from vlmflow.supervisor.progress import Newest
from vlmflow.supervisor.report import TrainingReport
from vlmflow.supervisor.run_folder import JOB, RunFolder


class RunHistory:
    """The course of a training, updated from one event at a time; steps that a resumed training repeats count once.

    speed: tokens per second of each step. waiting: the share of a step's time in which rank 0 waited for data.
    """

    def __init__(self) -> None:
        self.newest = Newest()
        self.loss, self.eval_loss = Curve(), Curve()
        self.learning_rate, self.grad_norm = Curve(), Curve()
        self.speed, self.waiting = Curve(), Curve()
        self._tokens = 0

    def take(self, event: Event) -> None:
        """Add one more event."""
        if isinstance(event, Begin):
            self._tokens = event.tokens
            for curve in (self.loss, self.eval_loss, self.learning_rate, self.grad_norm, self.speed, self.waiting):
                curve.cut(event.step)
        elif isinstance(event, Log):
            self._log(event)
        self.newest.take(event)

    def _log(self, event: Log) -> None:
        if event.eval_loss is not UNSET:
            self.eval_loss.add(event.step, event.eval_loss)
        if event.loss is not UNSET:
            self.loss.add(event.step, event.loss)
            seconds = event.time - self.newest.time
            if seconds > 0:
                self.speed.add(event.step, (event.tokens - self._tokens) / seconds)
            if seconds > 0 and event.waited is not UNSET:
                share = (event.waited - (self.newest.waited or 0.0)) / seconds
                self.waiting.add(event.step, min(1.0, max(0.0, share)))
        if event.learning_rate is not UNSET:
            self.learning_rate.add(event.step, event.learning_rate)
        if event.grad_norm is not UNSET:
            self.grad_norm.add(event.step, event.grad_norm)
        self._tokens = event.tokens

    def charts(self) -> list[LineChart]:
        """Return the charts of all figures that have a value."""
        steps = self.newest.target
        charts = [
            line_chart("Loss", "nats per token", {"train": self.loss, "val": self.eval_loss}, steps),
            line_chart("Learning rate", "learning rate", {"train": self.learning_rate}, steps),
            line_chart("Gradient norm", "norm before clipping", {"train": self.grad_norm}, steps),
            line_chart("Speed", "tokens per second, of all processes", {"train": self.speed}, steps),
            line_chart("Waiting for data", "share of a step's time", {"train": self.waiting}, steps, "{:.0%}".format),
        ]
        return [chart for chart in charts if chart]


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


@dataclass(frozen=True)
class MadeOf:
    """model: its source. settings: key and value of those that differ from the defaults."""

    model: str
    dataset: str
    settings: list[tuple[str, str]]


def to_train(model: str, dataset: str, run: TrainBlock | RunSettings) -> MadeOf:
    """Return what a run will be trained from."""
    of_run = run.model_dump(mode="json", include={"device", "tuner", "strategy", "deepspeed"})
    train = run.train.model_dump(mode="json")
    return MadeOf(model, dataset, own_settings(asked(train, of_run | {"processes": run.nodes * run.processes}, 0)))


def trained(model: str, dataset: str, report: TrainingReport) -> MadeOf:
    """Return what a finished training was made of."""
    return MadeOf(model, dataset, own_settings(settings_of(report)))
