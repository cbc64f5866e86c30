"""The sizes of a model that decide its memory and its work, as transformers builds it from its config.json."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from vlmflow.config.model_types import ModelPart
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.kept import measured
from vlmflow.pictures.budget import PictureBudget

CONFIG = "config.json"

FILES = (CONFIG, "preprocessor_config.json", "processor_config.json")
"""The files that say how a model is built, and what its picture tower gets."""

LARGEST = 1 << 20
"""Bytes of such a file, at most."""


WITHOUT = "train without an estimate: the smoke run shows whether the longest rows fit"


class UnknownModelError(VlmflowError):
    """The estimate does not know this architecture; a run of it trains without an estimate."""


class Files(msgspec.Struct, frozen=True):
    """A model without weights: the content of those of FILES that it has, by their names."""

    content: dict[str, str]

    def write(self, folder: Path) -> Path:
        """Write each file into an existing folder, for libraries that read a model by its path; returns the folder."""
        for name, content in self.content.items():
            (folder / name).write_text(content)
        return folder


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of the model that are alike: their names differ in numbers alone.

    name: of the layer that has it, or of the parameter itself; with * for each number. count: how many. inputs,
    outputs: its widths; of a convolution, the numbers that it reads at a place. weights: of one, with its bias.
    in_layers: whether it is in the decoder's layers. linear: whether 4 bits are for it: a linear layer, but not the
    output head. listed: whether ms-swift's all-linear names it. parameter: whether no layer of its own has it. experts:
    so many have such a matrix in one parameter, and each token goes through `active` of them.
    """

    name: str
    part: ModelPart
    count: int
    inputs: int
    outputs: int
    weights: int
    in_layers: bool
    linear: bool = False
    listed: bool = False
    parameter: bool = False
    experts: int = 1
    active: int = 1


class Shape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sizes of a model.

    weights: their numbers by part, each weight once. matrices: all of them. outside: the language model's weights that
    are in none of its layers. layers: of the language model. width: of its hidden states. head: weights of the output
    head. attention: the width of all queries, over all layers; if that of the values differs, their mean. window: the
    tokens that the narrowest layer attends to; null if all layers attend to all. sees: whether it takes pictures.
    """

    weights: dict[ModelPart, int]
    matrices: list[Matrix]
    outside: int
    layers: int
    width: int
    head: int
    attention: int
    window: int | None
    sees: bool


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A model that transformers does not build as a decoder. reason: for people."""

    reason: str


class ModelShape(msgspec.Struct, frozen=True):
    """A model: the files that say how it is built, and its sizes."""

    files: Files
    of: Shape

    def budget(self, image_max_tokens: int) -> PictureBudget:
        """Return the picture budget of a run; image_max_tokens: see TrainSettings. Raises as `PictureBudget.of`."""
        with TemporaryDirectory() as folder:
            return PictureBudget.of(self.files.write(Path(folder)), image_max_tokens)


def read_shape(model: Path) -> ModelShape:
    """Read a model's sizes by its folder, which needs no weights.

    Raises UnknownModelError if transformers knows no decoder of this kind, VlmflowError if a file is damaged, or
    transformers cannot build the model.
    """
    file = model / CONFIG
    next_step = "take a model with the files that its owner published"
    try:
        content = {name: _text(model / name) for name in FILES if name == CONFIG or (model / name).exists()}
        msgspec.json.decode(content[CONFIG], type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: {error}", next_step) from None
    return shape_of(Files(content), str(file))


def shape_of(files: Files, name: str = CONFIG) -> ModelShape:
    """Return a model's sizes by its files. name: of its config.json, for people; raises as `read_shape` does."""
    try:
        found: Shape | Unknown = measured("vlmflow.estimate.meta_shape", files, Shape | Unknown)  # type: ignore[arg-type]
    except VlmflowError as error:
        raise VlmflowError(f"{name}: {error.cause}", error.next_step) from None
    if isinstance(found, Unknown):
        raise UnknownModelError(f"{name}: {found.reason}", WITHOUT)
    return ModelShape(files, found)


def _text(file: Path) -> str:
    """Return the content of a file; raises ValueError if it is too large."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file.name} has more than {LARGEST:,} bytes")
    return file.read_text(encoding="utf-8")
