"""What a run is trained from, for pages: its model, its data set, its own settings."""

from dataclasses import dataclass

from vlmflow.config.differing import asked, own_settings
from vlmflow.config.run_blocks import TrainBlock
from vlmflow.config.run_settings import RunSettings
from vlmflow.reports.former import settings_of
from vlmflow.supervisor.accounts import TrainingReport


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
