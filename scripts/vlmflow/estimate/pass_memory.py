"""The bytes of a forward and a backward pass, of the language model and of the picture tower, as functions of its rows.

Each function is measured once for a model and a training mode (`fake_pass`, `picture_pass`), in seconds and without a
GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Self

import msgspec

from vlmflow.config.model_types import ModelPart
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.shape import LANGUAGE, WITHOUT, Files, ModelShape, UnknownModelError, adapted, measured
from vlmflow.estimate.states import Adapter, TrainingMode


@dataclass(frozen=True)
class Batch:
    """The rows that one GPU processes at a time.

    rows: their number. tokens: of all rows, with padding. longest: of the longest row. logits: positions for which
    logits are computed. padded: whether rows are padded to the longest, which sdpa needs a mask for. windowed: whether
    a row is longer than a layer's window, for which that layer needs one. pictures: picture tokens of all rows.
    """

    rows: int
    tokens: int
    longest: int
    logits: int
    padded: bool = False
    windowed: bool = False
    pictures: int = 0


@dataclass(frozen=True)
class Activations:
    """Bytes that the language model needs.

    kept: saved for the backward pass until a layer's turn comes. layer, logits: needed besides, at different times: to
    compute a layer, or its gradients; and for logits and loss.
    """

    kept: int
    layer: int
    logits: int


@dataclass(frozen=True)
class Pictures:
    """Bytes of the tower. kept: until the backward pass reaches it. passing: at most, while the tower computes."""

    kept: int
    passing: int


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The bytes at one moment of a pass: constant + token · tokens + logit · logits + square · Σ (tokens of a row)²."""

    constant: int
    token: int
    logit: int
    square: int

    def of(self, batch: Batch) -> int:
        """Return the bytes for one batch."""
        squares = batch.rows * batch.longest**2
        return self.constant + self.token * batch.tokens + self.logit * batch.logits + self.square * squares

    def covers(self, other: Self) -> bool:
        """Return whether this moment never needs less than another."""
        return all(a >= b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))


Moments = Annotated[Sequence[Moment], msgspec.Meta(min_length=1)]


class PassMemory(msgspec.Struct, frozen=True):
    """The moments of a pass that may need the most.

    kept: as the loss begins. layers: of the layers, forward and backward. loss: of what is between.
    """

    kept: Moment
    layers: Moments
    loss: Moments

    def of(self, batch: Batch) -> Activations:
        """Return the bytes for one batch."""
        kept = self.kept.of(batch)
        layers, loss = (max(moment.of(batch) for moment in moments) for moments in (self.layers, self.loss))
        return Activations(kept, max(0, layers - kept), max(0, loss - kept))


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of a pass beside its rows.

    base: bytes of a weight. trained: the parts of which all weights are trained. adapted: names of the layers that have
    an adapter, with * for each number. See `TrainingMode` for the others, and `Batch` for padded and windowed.
    """

    files: Files
    base: int
    autocast: bool
    trained: Sequence[ModelPart]
    adapted: Sequence[str]
    adapter: Adapter
    quantised: bool
    gradient_checkpointing: bool
    eager: bool
    liger: bool
    padded: bool = False
    windowed: bool = False


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A number that grows with picture tokens: constant + token · tokens, + square · tokens² of each picture."""

    constant: float
    token: float
    square: float = 0.0

    def of(self, tokens: int) -> int:
        """Return the number for pictures with so many tokens together, without squares."""
        return round(self.constant + self.token * tokens) if tokens else 0


class PictureMemory(msgspec.Struct, frozen=True):
    """What pictures need before the language model gets them.

    kept: bytes until the backward pass reaches the tower. passing: bytes at most, while the tower computes. forward,
    training: operations, without and with the backward pass.
    """

    kept: Line
    passing: Line
    forward: Line
    training: Line


def language_activations(shape: ModelShape, mode: TrainingMode, batch: Batch) -> Activations:
    """Return the bytes of the language model's activations for one batch.

    Raises UnknownModelError if transformers or peft cannot run its layers on tensors without data.
    """
    one = pass_of(shape, mode, padded=batch.padded, windowed=batch.windowed)
    try:
        return measured("vlmflow.estimate.fake_pass", one, PassMemory).of(batch)
    except VlmflowError as error:
        raise UnknownModelError(error.cause, WITHOUT) from None


def pass_of(shape: ModelShape, mode: TrainingMode, *, padded: bool = False, windowed: bool = False) -> Pass:
    """Return what decides a pass of a model in a training mode. padded, windowed: see `Batch`."""
    matrices = [] if mode.is_full else adapted(shape, mode.trained, mode.adapter.targets)
    return Pass(
        files=shape.files,
        base=mode.base,
        autocast=mode.autocast,
        trained=sorted(mode.trained) if mode.is_full else [],
        adapted=[matrix.name for matrix in matrices],
        adapter=mode.adapter,
        quantised=mode.quantised,
        gradient_checkpointing=mode.gradient_checkpointing,
        eager=mode.eager,
        liger=mode.liger,
        padded=padded,
        windowed=windowed,
    )


def picture_tower(shape: ModelShape, mode: TrainingMode, batch: Batch) -> Pictures:
    """Return the bytes for the pictures of a batch; see `assumed` for a tower that cannot be passed."""
    if not batch.pictures or not shape.of.sees:
        return Pictures(0, 0)
    found = pictures_of(shape, mode)
    if isinstance(found, str):
        alike = language_activations(shape, mode, Batch(1, batch.pictures, batch.pictures, 0))
        return Pictures(alike.kept, alike.kept + alike.layer)
    return Pictures(found.kept.of(batch.pictures), found.passing.of(batch.pictures))


def assumed(shape: ModelShape, mode: TrainingMode) -> str | None:
    """Return what the estimate assumes of pictures in place of a measurement, for people; None if nothing."""
    found = pictures_of(shape, mode) if shape.of.sees else None
    if not isinstance(found, str):
        return None
    return (
        "the picture tower cannot be passed without data, so each picture token is counted in it as much as in the "
        f"language model: {found}"
    )


def pictures_of(shape: ModelShape, mode: TrainingMode) -> PictureMemory | str:
    """Return what pictures need; a reason for people if the tower cannot be passed."""
    one = pass_of(shape, replace(mode, liger=False, eager=False))
    parts = {matrix.name: matrix.part for matrix in shape.of.matrices}
    adapted = [name for name in one.adapted if parts[name] != LANGUAGE]
    trained = [part for part in one.trained if part != LANGUAGE]
    if not adapted and not trained:  # the tower computes forward alone
        one = pass_of(shape, TrainingMode(tuner="full", trained=frozenset(), half=mode.half, sharding=mode.sharding))
        one = msgspec.structs.replace(one, base=mode.base, gradient_checkpointing=False)
    return _pictures_of(msgspec.json.encode(msgspec.structs.replace(one, adapted=adapted, trained=trained)))


@cache
def _pictures_of(one: bytes) -> PictureMemory | str:
    try:
        return measured("vlmflow.estimate.picture_pass", msgspec.json.decode(one, type=Pass), PictureMemory)
    except VlmflowError as error:
        return error.cause
