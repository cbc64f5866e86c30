"""The configuration, as one model: what may be set, what it means, and what holds when it is not set."""

from pathlib import Path
from typing import Any, Self

import pydantic
from pydantic import field_validator, model_validator

from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.faults import say_faults
from vlmflow.config.run_settings import Positive, RunSettings
from vlmflow.config.settings import Name, Settings
from vlmflow.config.source import parse_source
from vlmflow.errors import VlmflowError

TARGETS = ("raw", "models", "images", "converted", "data", "checkpoints", "work", "merged", "logs", "benchmarks")
"""The folders of the workflow's own files in the working directory."""


class StoreSettings(Settings):
    """Folders for bulk bytes, which Snakemake does not track; manifests among the outputs describe them.

    Relative paths are relative to the working directory.
    """

    raw: str = "stores/raw"
    """Downloaded data files, by repository and revision."""

    models: str = "stores/models"
    """Downloaded model folders, by repository and revision."""

    pictures: str = "stores/pictures"
    """One folder per data set, with a link or a rewritten copy for every picture that a row names."""

    runs: str = "stores/runs"
    """Run folders: working checkpoints and finished adapters, by run and digest of data and settings."""

    @field_validator("*")
    @classmethod
    def _folder(cls, folder: str) -> str:
        if not folder:
            raise ValueError("'' is no folder")
        return str(Path(folder).expanduser())


class ModelSettings(Settings):
    """One base model."""

    source: str
    """hf://OWNER/NAME (pinned in pins.yaml), file:///PATH, or the path of a local folder."""

    model_type: str
    """ms-swift's name of the architecture: a local folder alone does not tell it."""


class ClusterSettings(Settings):
    """What a Kubernetes cluster can give to one pod."""

    max_mem_mb: Positive = 512_000
    """A pod that ran out of memory is tried again with half as much more, up to this many MB: a large node's."""


class Config(Settings):
    """The whole configuration: `config.yaml`, with what `--configfile` and `--config` lay over it."""

    stores: StoreSettings = StoreSettings()
    cluster: ClusterSettings = ClusterSettings()
    models: dict[Name, ModelSettings]
    """Base models, by name; fetched into `models/NAME`."""

    datasets: dict[Name, DatasetSettings]
    """Data sets, by name; validated into `data/NAME`."""

    runs: dict[Name, RunSettings]
    """Runs, by name; `merged/NAME` is the target."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        for name, run in self.runs.items():
            for key, known in (("model", self.models), ("dataset", self.datasets)):
                if (wanted := getattr(run, key)) not in known:
                    raise ValueError(f"runs.{name}.{key}: {wanted!r} stands not under {key}s: {_names(known)}")
        return self

    @model_validator(mode="after")
    def _stores_are_apart(self) -> Self:
        for name, folder in self.stores:
            _refuse_target(f"stores.{name}", Path(folder))
        return self

    @model_validator(mode="after")
    def _sources_are_readable_and_apart(self) -> Self:
        for name, model in self.models.items():
            _source(f"models.{name}.source", model.source)
        for name, dataset in self.datasets.items():
            for number, root in enumerate(dataset.image_roots):
                store = Path(self.stores.pictures).resolve()
                if Path(root).expanduser().resolve().is_relative_to(store):
                    raise ValueError(f"datasets.{name}.image_roots.{number}: {root!r} lies in stores.pictures")
            train = _source(f"datasets.{name}.train", dataset.train)
            if dataset.test and _source(f"datasets.{name}.test", dataset.test).name == train.name:
                raise ValueError(
                    f"datasets.{name}.test: {dataset.test} and {dataset.train} would both become "
                    f"raw/{name}/{train.name}; give one of the files another name"
                )
        return self


def check_config(merged: dict[str, Any], files: list[Path]) -> Config:
    """Check the merged configuration and fill in the defaults.

    merged: what the files and the command line give together.
    files: the files it was merged from, lowest first, to say where a wrong value stands.

    Raises VlmflowError with one line per fault: file, key path, value, what is allowed, nearest known key.
    """
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        lines = say_faults(error, Config.model_json_schema(), merged, files)
        raise VlmflowError(lines, "mend the configuration; docs/config.md lists every key") from None


def _source(where: str, text: str) -> Any:
    try:
        source = parse_source(text)
    except VlmflowError as error:
        raise ValueError(f"{where}: {error.cause}; {error.next_step}") from None
    if isinstance(source, Path):
        _refuse_target(where, source)
    return source


def _refuse_target(where: str, place: Path) -> None:
    """Refuse a path of the user's among the targets: Snakemake removes what a rule is about to make."""
    for target in TARGETS:
        if place.resolve().is_relative_to(Path(target).resolve()):
            raise ValueError(f"{where}: {str(place)!r} lies in {target}/, which the workflow makes and removes")


def _names(known: dict[str, Any]) -> str:
    return ", ".join(known) or "none"
