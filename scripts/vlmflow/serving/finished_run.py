"""A finished run in a working directory: its weights, its base, its adapter, and how it was trained.

All of it is what the run recorded (merged/RUN/provenance.json): the configuration may have changed since.

The folder that a server loads: links to a model's files, with a run's picture limits in the processor's file.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmflow.config.settings import is_name
from vlmflow.config.strategies import ADAPTER_CONFIG, ADAPTER_WEIGHTS, tuner_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.fetch.placed import model_with, read_model_manifest
from vlmflow.pictures.budget import PictureBudget
from vlmflow.supervisor.report import read_release


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
    """The used part of provenance.json (reports/provenance, Provenance)."""

    base_model: _BaseModel
    training: _Training


@dataclass(frozen=True)
class FinishedRun:
    """A run whose weights are published.

    folder: the working directory. merged: the folder of its weights. settings: how it was trained. device: on what.
    ranks: parallel trainers, one GPU each on cuda. tuner: its name. source: of its base model, as in the configuration.
    base_digest: of the base model's files (fetch/placed, digest_of).
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
        if match := model_with(self.folder / "models", self.base_digest):
            return read_model_manifest(match[0]).folder
        raise VlmflowError(
            f"{self.folder / 'models'}: holds no model with the files of {self.source} that the run was trained on",
            "fetch it: vlmflow run … models/NAME/manifest.json",
        )

    def adapter(self) -> Path:
        """Return the folder of the run's adapter, after a check that it is the trained one.

        Raises VlmflowError if the run trains no adapter, or its files are missing or have changed.
        """
        if not tuner_of(self.tuner).trains_adapter:
            raise VlmflowError(
                f"run {self.name}: tuner {self.tuner} trains the weights themselves, so there is no adapter",
                "serve its merged weights: vlmflow serve without --what adapter",
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
    if not is_name(name):
        raise VlmflowError(f"{name!r} is no name of a run", "name it as under runs in your configuration")


def published(folder: Path, name: str) -> Path:
    """Return the folder of a run's published weights, merged/RUN.

    Raises VlmflowError if there is no such name; with the runs that are there, if this one is not.
    """
    refuse_no_name(name)
    merged = (folder / "merged" / name).absolute()
    if not merged.is_dir():
        there = sorted(entry.name for entry in (folder / "merged").glob("*") if entry.is_dir())
        raise VlmflowError(
            f"{merged}: the weights of run {name!r} are not there; finished here: {', '.join(there) or 'none'}",
            f"make them: vlmflow run … merged/{name}; or name the working directory by --directory",
        )
    return merged


def link_served(model: Path, folder: Path, most_tokens: int, adapter: Path | None = None) -> None:
    """Make the folder from which a model is served.

    model: the model's files: a base model's folder of links, or merged/RUN.
    folder: the folder to make; one that exists is replaced.
    most_tokens: the run's train.image_max_tokens, also for the base model: its answers are compared with the run's.
    adapter: the folder of an adapter (checkpoints/RUN/full) that transformers puts upon the model as it loads it.

    Raises VlmflowError if the model has no config.json, or the adapter lacks a file.
    """
    # Snakemake's mark and desktops' files begin with a dot.
    sources = {
        file.relative_to(model): file for file in sorted(model.rglob("*")) if file.is_file() and file.name[0] != "."
    }
    if Path("config.json") not in sources:
        raise VlmflowError(f"{model}: has no config.json, so it is not a model", "name the folder of a whole model")
    if adapter is not None:
        sources |= {Path(name): adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        if missing := [source for source in sources.values() if not source.is_file()]:
            raise VlmflowError(f"{missing[0]}: is missing", "train the run with a tuner that makes an adapter")
    budget = PictureBudget.of(model, most_tokens)
    processor, limits = budget.processor, budget.limits
    with whole_folder(folder) as part:
        for name, source in sources.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            if processor and limits and str(name) == processor.file:
                (part / name).write_bytes(processor.limited(limits))
            else:
                (part / name).symlink_to(source.resolve())
