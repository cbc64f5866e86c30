"""The bytes of a forward and a backward pass of the language model, as one function of its rows.

The function is measured once for a model and a way to train it (`fake_pass`), in seconds and without a GPU, and kept in
the user's cache. So an estimate that finds it there needs no torch.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Self

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.estimate.parameters import LANGUAGE, adapted
from vlmflow.estimate.shape import ModelShape, TextShape
from vlmflow.estimate.way import Adapter, Way
from vlmflow.swift.quick_imports import quick_imports

log = logging.getLogger("vlmflow")

MEASURED_WITH = ("torch", "transformers", "peft")
"""Packages whose versions decide what a pass keeps."""


@dataclass(frozen=True)
class Batch:
    """The rows that one GPU processes at a time.

    rows: their number. tokens: of all rows, with padding. longest: of the longest row. logits: positions for which
    logits are computed. padded: whether rows are padded to the longest, which sdpa needs a mask for. pictures: picture
    tokens of all rows.
    """

    rows: int
    tokens: int
    longest: int
    logits: int
    padded: bool = False
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

    tied: whether head and embedding are one matrix. base: bytes of a weight. compute: of a number in matrix products.
    full: whether the weights are trained. adapted: names of the linear layers that have an adapter. See `Way` for the
    others, and `Batch` for padded.
    """

    text: TextShape
    tied: bool
    base: int
    compute: int
    autocast: bool
    full: bool
    adapted: Sequence[str]
    adapter: Adapter
    quantised: bool
    gradient_checkpointing: bool
    eager: bool
    liger: bool
    padded: bool


def language_activations(shape: ModelShape, way: Way, batch: Batch) -> Activations:
    """Return the bytes of the language model's activations for one batch."""
    return pass_memory(pass_of(shape, way, padded=batch.padded)).of(batch)


def pass_of(shape: ModelShape, way: Way, *, padded: bool) -> Pass:
    """Return what decides a pass of a model and a way to train. padded: see `Batch`."""
    matrices = () if way.is_full else adapted(shape, way.trained, way.adapter.targets)[LANGUAGE]
    return Pass(
        text=shape.text,
        tied=shape.tied,
        base=way.base,
        compute=way.compute,
        autocast=way.autocast,
        full=way.is_full and LANGUAGE in way.trained,
        adapted=[matrix.name for matrix, _ in matrices],
        adapter=way.adapter,
        quantised=way.quantised,
        gradient_checkpointing=way.gradient_checkpointing,
        eager=way.eager,
        liger=way.liger,
        padded=padded,
    )


def pass_memory(one: Pass) -> PassMemory:
    """Return the bytes of a pass: from the user's cache, or measured now, which takes seconds and needs torch.

    Raises VlmflowError if transformers cannot build or run layers of these sizes.
    """
    return _known(msgspec.json.encode(one))


@cache
def _known(one: bytes) -> PassMemory:
    file = _folder() / f"{hashlib.sha256(one + _made_by()).hexdigest()}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=PassMemory)
    except (OSError, msgspec.DecodeError, RecursionError):
        log.info("measuring the memory of a pass on tensors without data; once for a model and a way to train it")
    with quick_imports():
        from vlmflow.estimate.fake_pass import measure  # imports torch, which takes seconds

    try:
        found = measure(msgspec.json.decode(one, type=Pass))
    except Exception as error:  # sizes of a foreign file, in foreign code
        raise VlmflowError(
            f"a pass with the sizes of the model's config.json fails: {type(error).__name__}: {error}",
            "take a Qwen3 or Qwen3-VL model with the files that its owner published; to train it in any case, set "
            "runs.NAME.estimate: ignore",
        ) from error
    try:
        with whole_file(file) as content:
            content.write(msgspec.json.encode(found))
    except OSError as error:
        log.info(f"it is not kept for the next estimate: {error}")
    return found


def _folder() -> Path:
    """Return the folder in the user's cache (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmflow" / "passes"


@cache
def _made_by() -> bytes:
    """Return the code that measures, and the versions of the packages that it runs."""
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("pass_memory.py", "fake_pass.py"))
    return code + " ".join(map(version, MEASURED_WITH)).encode()
