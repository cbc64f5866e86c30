"""The sizes of a model that decide its memory and its work, as transformers builds it from its config.json.

What is measured of a model once, in a child process with limits, is kept in the user's cache: an estimate that finds it
there needs no torch. A model's parts are ms-swift's: its freeze_llm, freeze_vit and freeze_aligner freeze one each.
"""

import hashlib
from collections.abc import Collection, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from vlmflow.config.model_types import ModelPart
from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.files import user_cache, whole_file
from vlmflow.pictures.budget import PictureBudget
from vlmflow.swift.child_process import limited, quick_imports

LANGUAGE: ModelPart = "language_model"
TOWER: ModelPart = "vision_tower"
ALIGNER: ModelPart = "aligner"
PARTS = (LANGUAGE, TOWER, ALIGNER)
"""The parts of a model, as `train.freeze` names them."""

ALL_LINEAR = "all-linear"
"""ms-swift's word for the linear layers of every part that is not frozen, but for the output head."""

CONFIG = "config.json"

FILES = (CONFIG, "preprocessor_config.json", "processor_config.json")
"""The files that say how a model is built, and what its picture tower gets."""

LARGEST = 1 << 20
"""Bytes of such a file, at most."""

PACKAGES = ("torch", "transformers", "peft")
"""Packages whose versions decide what is measured."""

CODE = ("fake_pass.py", "fake_tensors.py", "meta_shape.py", "../swift/meta_model.py", "../config/model_types.json")

WITHOUT = "train without an estimate: the smoke run shows whether the longest rows fit"

Measured = TypeVar("Measured")


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
        sizes: Shape | Unknown = measured("meta_shape", "measure", files, Shape | Unknown)  # type: ignore[arg-type]
    except VlmflowError as error:
        raise VlmflowError(f"{name}: {error.cause}", error.next_step) from None
    if isinstance(sizes, Unknown):
        raise UnknownModelError(f"{name}: {sizes.reason}", WITHOUT)
    return ModelShape(files, sizes)


def _text(file: Path) -> str:
    """Return the content of a file; raises ValueError if it is too large."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file.name} has more than {LARGEST:,} bytes")
    return file.read_text(encoding="utf-8")


def weights_of(shape: ModelShape) -> int:
    """Return the number of all weights of a model."""
    return sum(shape.of.weights.values())


def trained_weights(shape: ModelShape, trained: Collection[ModelPart]) -> int:
    """Return the number of weights that full fine-tuning changes. trained: the parts that are not frozen."""
    return sum(count for part, count in shape.of.weights.items() if part in trained)


def adapted(shape: ModelShape, trained: Collection[ModelPart], targets: Iterable[str]) -> list[Matrix]:
    """Return the matrices that get an adapter.

    trained: the parts that are not frozen. targets: names as in `train.lora.target_modules`. Names other than
    ALL_LINEAR match in every part, as peft matches them: by the end of a layer's name.
    """
    names = tuple(f".{name}" for name in targets if name != ALL_LINEAR)
    every = ALL_LINEAR in targets
    return [
        matrix
        for matrix in shape.of.matrices
        if (every and matrix.listed and matrix.part in trained)
        or (not matrix.parameter and f".{matrix.name}".endswith(names))
    ]


def adapter_weights(matrices: Iterable[Matrix], rank: int, dora: bool = False) -> int:
    """Return the number of an adapter's weights on some matrices: two factors each, and DoRA's vector of magnitudes.

    Experts that share a parameter have factors each. Source: peft 0.20, tuners/lora/layer.py (`update_layer`,
    `ParamWrapper`) and dora.py.
    """
    return sum(
        matrix.count * matrix.experts * (rank * (matrix.inputs + matrix.outputs) + dora * matrix.outputs)
        for matrix in matrices
    )


def measured(module: str, function: str, given: msgspec.Struct, result: type[Measured]) -> Measured:
    """Return what a function of a module of this package returns: from the user's cache, or measured now.

    given: the function's argument. result: the type of what it returns.

    Raises VlmflowError if it fails: with the sizes of a foreign file, in foreign code.
    """
    content = _measured(module, function, msgspec.json.encode(given), type(given), result)  # type: ignore[arg-type]
    if isinstance(content, VlmflowError):
        raise VlmflowError(content.cause, content.next_step)
    return content  # type: ignore[no-any-return]


@cache
def _measured(module: str, function: str, given: bytes, type_of_given: Any, result: Any) -> Any:
    """Return the same, or the error."""
    name = module if function == "measure" else function
    file = user_cache() / "passes" / f"{name}-{hashlib.sha256(given + _made_by()).hexdigest()}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=result)
    except (OSError, msgspec.DecodeError, RecursionError):
        log.info(f"measuring the model ({name}) on tensors without data; once for a model and a training mode")
    with quick_imports():
        measure = getattr(import_module(f"vlmflow.estimate.{module}"), function)  # imports torch, which takes seconds
    content = limited(lambda: dict(msgspec.to_builtins(measure(msgspec.json.decode(given, type=type_of_given)))))
    try:
        if why := content.get("failed"):
            raise ValueError(why)
        checked = msgspec.convert(content, result)
    except (ValueError, msgspec.ValidationError) as error:  # such as a size that is a text
        return VlmflowError(
            f"a model of the sizes in config.json fails: {error}",
            "take a model with the files that its owner published; to train it in any case, set "
            "runs.NAME.estimate: ignore",
        )
    try:
        with whole_file(file) as kept:
            kept.write(msgspec.json.encode(content))
    except OSError as error:
        log.info(f"it is not kept for the next estimate: {error}")
    return checked


@cache
def _made_by() -> bytes:
    """Return the code that measures, and the versions of the packages that it runs."""
    code = b"".join(Path(__file__).parent.joinpath(name).read_bytes() for name in CODE)
    return code + " ".join(map(version, PACKAGES)).encode()
