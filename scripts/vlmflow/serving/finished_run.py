"""A finished run in a working directory: its weights, its base, its adapter, and how it was trained.

All of it is what the run recorded (merged/RUN/provenance.json): the configuration may have changed since.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmflow.config.settings import is_name
from vlmflow.config.tuners import tuner_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_folder import model_with, read_model_manifest
from vlmflow.supervisor.released import read_release


class Trained(msgspec.Struct, frozen=True):
    """The used part of a run's `train` block (config/run_settings)."""

    image_max_tokens: int
    max_length: int
    dtype: str


class _Training(msgspec.Struct, frozen=True):
    settings: Trained
    device: str
    world_size: int
    tuner: str


class _BaseModel(msgspec.Struct, frozen=True):
    source: str
    digest: str


class _Record(msgspec.Struct, frozen=True):
    """The used part of provenance.json (reports/accounts, Provenance)."""

    base_model: _BaseModel
    training: _Training


@dataclass(frozen=True)
class FinishedRun:
    """A run whose weights are published.

    folder: the working directory. merged: the folder of its weights. settings: how it was trained. device: on what.
    ranks: parallel trainers, one GPU each on cuda. tuner: its name. source: of its base model, as in the configuration.
    base_digest: of the base model's files (fetch/model_folder, digest_of).
    """

    name: str
    folder: Path
    merged: Path
    settings: Trained
    device: str
    ranks: int
    tuner: str
    source: str
    base_digest: str

    def base(self) -> Path:
        """Return the folder of the base model's files, after a check that they are those of the training.

        Raises VlmflowError if no model in the working directory is, or its files have changed.
        """
        if found := model_with(self.folder / "models", self.base_digest):
            return read_model_manifest(found[0]).folder
        raise VlmflowError(
            f"{self.folder / 'models'}: holds no model with the files of {self.source} that the run was trained on",
            "fetch it: .venv/bin/snakemake … -- models/NAME/manifest.json",
        )

    def adapter(self) -> Path:
        """Return the folder of the run's adapter, after a check that it is the trained one.

        Raises VlmflowError if the run trains no adapter, or its files are missing or have changed.
        """
        if not tuner_of(self.tuner).trains_adapter:
            raise VlmflowError(
                f"run {self.name}: tuner {self.tuner} trains the weights themselves, so there is no adapter",
                "use its merged weights: leave ADAPTER out",
            )
        full = self.folder / "checkpoints" / self.name / "full"
        read_release(full)
        return full.absolute()


def finished_run(folder: Path, name: str) -> FinishedRun:
    """Return a run of a working directory.

    Raises VlmflowError if its weights are not there, or their provenance cannot be read.
    """
    merged = published(folder, name)
    record = read_account(merged / "provenance.json", _Record)
    training, base = record.training, record.base_model
    how = (training.settings, training.device, training.world_size, training.tuner)
    return FinishedRun(name, folder, merged, *how, base.source, base.digest)


def refuse_no_name(name: str) -> None:
    """Raise VlmflowError if a text that a person gave is no name of a run, which becomes part of a path."""
    if not name:
        raise VlmflowError("no run is named", "say which run: RUN=…, as under runs in your configuration")
    if not is_name(name):
        raise VlmflowError(f"{name!r} is no name of a run", "give RUN=NAME, as under runs in your configuration")


def published(folder: Path, name: str) -> Path:
    """Return the folder of a run's published weights, merged/RUN.

    Raises VlmflowError if there is no such name; with the runs that are there, if this one is not.
    """
    refuse_no_name(name)
    merged = (folder / "merged" / name).absolute()
    if not merged.is_dir():
        there = sorted(place.name for place in (folder / "merged").glob("*") if place.is_dir())
        raise VlmflowError(
            f"{merged}: the weights of run {name!r} are not there; finished here: {', '.join(there) or 'none'}",
            f'make them: .venv/bin/snakemake … -- merged/{name}; or name the working directory: ARGS="--directory …"',
        )
    return merged
