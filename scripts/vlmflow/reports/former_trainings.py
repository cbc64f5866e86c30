"""What a training is made of, for pages, and the former trainings of a run: in what each differs, what it came to."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.run_blocks import differing, flattened, own_settings
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, printable
from vlmflow.supervisor.progress import Newest, newest_of
from vlmflow.supervisor.report import TrainingReport
from vlmflow.supervisor.run_folder import JOB, RunFolder


@dataclass(frozen=True)
class MadeOf:
    """model: its source. settings: key and value of those that differ from the defaults."""

    model: str
    dataset: str
    settings: list[tuple[str, str]]


def to_train(model: str, dataset: str, run: PartOf[RunSettings]) -> MadeOf:
    """Return what a run will be trained from."""
    of_run = run.model_dump(mode="json", include={"device", "tuner", "strategy", "deepspeed"})
    train = run.train.model_dump(mode="json")
    return MadeOf(model, dataset, own_settings(flattened(train, of_run | {"processes": run.nodes * run.processes}, 0)))


def trained(model: str, dataset: str, report: TrainingReport) -> MadeOf:
    """Return what a finished training was made of."""
    return MadeOf(model, dataset, own_settings(settings_of(report)))


def settings_of(report: TrainingReport) -> dict[str, Any]:
    """Return the settings of a finished training by dotted key (`flattened`)."""
    device = "cpu" if report.device == "cpu" else "cuda"  # the report may have a GPU's name
    of_run = {"tuner": report.tuner, "strategy": report.strategy, "deepspeed": report.deepspeed}
    return flattened(report.settings, {"device": device, **of_run, "processes": report.world_size}, report.target)


RUN_FOLDER = re.compile(r"[0-9a-f]{16}(\.refused-\d+)?")
"""A run folder's name: the digest of its training, with a number if it was set aside."""

ROWS, BASE = "rows and pictures", "base model"
"""The inputs of a training whose digests are compared, as its settings are."""


class _Digest(msgspec.Struct):
    digest: str


class _Job(msgspec.Struct):
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
    folders = [path for path in stage.glob("*/") if RUN_FOLDER.fullmatch(path.name) and (path / JOB).is_file()]
    folders.sort(key=lambda path: (path / JOB).stat().st_mtime_ns, reverse=True)
    if present:
        settings = settings_of(present) | {ROWS: present.digests.data, BASE: present.digests.model}
        return [_former(path, lambda: settings) for path in folders if path.name != present.digests.job]
    return [_former(path, lambda: _made_with(folders[0])) for path in folders[1:]]


def _former(folder: Path, present: Callable[[], Mapping[str, Any]]) -> FormerTraining:
    """Return a former training. present: gives the settings of the present one; raises VlmflowError if unreadable."""
    newest = newest_of(RunFolder(folder))
    try:
        now = present()
        differences = differing(_made_with(folder), now)
    except VlmflowError as error:
        return FormerTraining(folder, printable(f"not compared: {error.cause}"), _came_to(newest))
    differs = ", ".join(
        f"other {key}" if key in (ROWS, BASE) else f"{key} {was} (now {now})" for key, (was, now) in differences.items()
    )
    aside = "set aside, because its input changed" if "." in folder.name else ""
    words = "; ".join(filter(None, [aside, differs])) or "the same settings and rows"
    return FormerTraining(folder, printable(words), _came_to(newest))


def _made_with(folder: Path) -> dict[str, Any]:
    """Return a training's settings by dotted key (`flattened`), with the digests of its inputs; raises VlmflowError."""
    job = read_account(folder / JOB, _Job)
    of_run = {key: getattr(job, key) for key in ("device", "tuner", "strategy", "deepspeed")}
    ranks, target = {"processes": job.nodes * job.processes}, newest_of(RunFolder(folder)).target
    return flattened(job.settings, of_run | ranks, target) | {ROWS: job.data.digest, BASE: job.model.digest}


def _came_to(newest: Newest) -> str:
    if not newest.target:
        return "no step was made"
    steps = f"{newest.step:,} of {newest.target:,} steps"
    losses = {step: loss for step, loss in newest.eval_losses.items() if loss == loss}  # NaN is not lowest
    if not losses:
        return f"{steps}, no validation loss"
    step = min(losses, key=lambda step: losses[step])
    return f"{steps}, lowest validation loss {losses[step]:.3f}, at step {step:,}"
