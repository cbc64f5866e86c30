"""The memory of one GPU in a training step, by what takes it.

What a training keeps between its steps is arithmetic. Sources: transformers and torch for ddp (AdamW keeps its moments
in the weights' type, float32 here; DDP's reducer has a copy of all gradients in buckets); DeepSpeed 0.19.8,
runtime/zero/stage_1_and_2.py and stage3.py, with ms-swift's zero2.json and zero3.json; bitsandbytes for 4 bits.

What a forward and a backward pass need, of the language model and of the picture tower, are functions of their rows.
Each is measured once for a model and a way to train (`fake_pass`), in seconds and without a GPU.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

import msgspec

from vlmflow.config.model_types import ModelPart
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.account import Memory
from vlmflow.estimate.run import BF16, FP32, Batch, EstimateInput, TrainingMode
from vlmflow.estimate.shape import (
    LANGUAGE,
    WITHOUT,
    Files,
    ModelShape,
    UnknownModelError,
    adapted,
    adapter_weights,
    measured,
    trained_weights,
    weights_of,
)

ABSMAX_BITS, DOUBLE_ABSMAX_BITS = 32 / 64, 8 / 64 + 32 / (64 * 256)
"""Bits per weight for the scales of 4-bit blocks of 64 weights: float32, or 8 bits with a float32 for every 256 of them
(bitsandbytes, `quantize_blockwise` and `nested`; arXiv:2305.14314, section 3)."""

ZERO2_BUCKET = 200_000_000
"""Elements of the buffer in which ZeRO-2 reduces gradients (ms-swift's zero2.json, `reduce_bucket_size`)."""

MAX_LIVE = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered at a time (ms-swift's zero3.json, `stage3_max_live_parameters`)."""

SUB_GROUP = 1_000_000_000
"""Weights that ZeRO-3 updates at a time (ms-swift's zero3.json, `sub_group_size`)."""

PREFETCHED_LAYERS = 2
"""Layers that FSDP2 holds gathered: the one that computes, and the next one."""

CONTEXT = 800_000_000
"""Bytes of CUDA's context: what the driver shows more than PyTorch reserves (H100, driver 580)."""

COMMUNICATION = 1_000_000_000
"""Bytes of NCCL's buffers with several GPUs. An assumption, not measured."""

LEFT, CACHE = 1_600_000_000, 0.1
"""What PyTorch reserves and does not use: bytes in any training, and a share of the bytes that come and go in a step.

LEFT is what ms-swift's trainings with rows of 150 tokens need beside tensors and context. CACHE is between the 0.06 of
ours on an H100, whose allocator has expandable segments, and the 0.35 of ms-swift's packs of 2,048 tokens. These
trainings and others: tests/published/trainings.csv, compared with the estimate by test_published_trainings.py.
"""


def memory(inputs: EstimateInput) -> Memory:
    """Return the memory of the batch that needs the most; without rows, what the training keeps between steps."""
    batches = inputs.batches() or [Batch(1, 0, 0, 0)]
    return max((_of_batch(inputs, batch) for batch in batches), key=lambda memory: memory.total)


def _of_batch(inputs: EstimateInput, batch: Batch) -> Memory:
    kept = states(inputs.shape, inputs.mode)
    language = language_activations(inputs.shape, inputs.mode, batch)
    tower = picture_tower(inputs.shape, inputs.mode, batch)
    at_once = language.kept + max(language.layer, language.logits)
    pictures = tower.kept + max(0, tower.passing - tower.kept - at_once)
    moving = max(at_once + pictures, kept.step)
    communication = COMMUNICATION if inputs.mode.processes > 1 else 0
    return msgspec.structs.replace(
        kept,
        activations=language.kept,
        layer=language.layer,
        logits=language.logits,
        pictures=pictures,
        cache=LEFT + round(CACHE * moving) if inputs.on_gpu else 0,
        context=(CONTEXT + communication) if inputs.on_gpu else 0,
    )


def states(shape: ModelShape, mode: TrainingMode) -> Memory:
    """Return what each GPU holds between two steps; the parts of a pass are 0."""
    strategy, trained = mode.strategy, trained_of(shape, mode)
    base_of_all, adapter_of_all = base_bytes(shape, mode), 0 if mode.is_full else trained * mode.trained_bytes
    base = math.ceil(base_of_all / mode.shares("weights"))
    if strategy.second_copy:  # DeepSpeed's partition_parameters.py, `_partition_param_sec`
        base += math.ceil((base_of_all + adapter_of_all) / strategy.second_copy)
    adapter = math.ceil(adapter_of_all / mode.shares("weights"))
    gradients = math.ceil(trained * mode.trained_bytes / mode.shares("gradients"))
    optimizer = math.ceil(trained * mode.optimizer_bytes / mode.shares("optimizer"))
    weights_here, optimizer_here = ("weights" not in strategy.offloads), ("optimizer" not in strategy.offloads)
    return Memory(
        weights=base * weights_here,
        adapter=adapter * weights_here,
        gradients=gradients * optimizer_here,
        optimizer=optimizer * optimizer_here,
        gathered=_gathered(shape, trained, mode),
        step=_step(trained, mode) * optimizer_here,
        host=(base + adapter) * (not weights_here) + (optimizer + gradients) * (not optimizer_here),
    )


def trained_of(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the number of weights that are trained: the adapter's, or the base's own."""
    if mode.is_full:
        return trained_weights(shape, mode.trained)
    lora = mode.settings.lora
    return adapter_weights(adapted(shape, mode.trained, lora.target_modules), lora.rank, lora.dora)


def base_bytes(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the bytes of the base's weights on all GPUs together, each weight once."""
    quantised = quantised_weights(shape, mode)
    bits = 4 + (DOUBLE_ABSMAX_BITS if mode.settings.quantisation.double else ABSMAX_BITS)
    trained = trained_weights(shape, mode.trained) if mode.is_full else 0
    frozen = weights_of(shape) - trained - quantised
    return math.ceil(frozen * mode.base + trained * mode.trained_bytes + quantised * bits / 8)


def quantised_weights(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the number of the base's weights that are in 4 bits: the language model's linear layers, or none."""
    matrices = [matrix for matrix in shape.of.matrices if matrix.linear and matrix.part == LANGUAGE]
    return sum(matrix.weights * matrix.count for matrix in matrices) if mode.tuner.quantises else 0


def _step(trained: int, mode: TrainingMode) -> int:
    """Return the bytes of DeepSpeed's copies of gradients: a flat one, and that in float32.

    ZeRO 3 makes them for a sub-group of weights at a time (stage3.py:2686, `_prepare_fp32_grad_for_sub_group`), ZeRO 1
    and 2 for all of the process (stage_1_and_2.py:3117, `step`).
    """
    if mode.strategy.engine != "deepspeed":
        return 0
    own = math.ceil(trained / mode.shares("optimizer"))
    if mode.shares("weights") > 1:
        own = min(own, SUB_GROUP)
    return own * (mode.trained_bytes + (FP32 if mode.trained_bytes < FP32 else 0))


def _gathered(shape: ModelShape, trained: int, mode: TrainingMode) -> int:
    """Return the bytes of buffers that the engine itself needs."""
    if mode.strategy.engine == "ddp":
        return trained * mode.trained_bytes if mode.processes > 1 else 0
    if mode.strategy.engine == "fsdp2":
        return _gathered_by_fsdp2(shape, mode)
    if mode.shares("weights") == 1 and "weights" not in mode.strategy.offloads:
        return ZERO2_BUCKET * mode.trained_bytes
    live = min(weights_of(shape), MAX_LIVE + shape.of.head) * (BF16 if mode.half else FP32)
    return live + shape.of.width**2 * mode.trained_bytes


def _gathered_by_fsdp2(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the bytes of two layers, and of the weights outside all layers, which stay gathered."""
    in_layers = shape.of.weights[LANGUAGE] - shape.of.outside
    layer, outside = math.ceil(in_layers / shape.of.layers), weights_of(shape) - in_layers
    gradients = PREFETCHED_LAYERS * layer * FP32 if mode.is_full else 0
    return (PREFETCHED_LAYERS * layer + outside) * BF16 + gradients


class Activations(NamedTuple):
    """Bytes that the language model needs.

    kept: saved for the backward pass until a layer's turn comes. layer, logits: needed besides, at different times: to
    compute a layer, or its gradients; and for logits and loss.
    """

    kept: int
    layer: int
    logits: int


class Pictures(NamedTuple):
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


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of a pass beside its rows.

    base: bytes of a weight. trained: the parts of which all weights are trained. adapted: names of the layers that have
    an adapter, with * for each number; rank, dropout, dora: of it. quantised: whether the language model's linear
    layers are in 4 bits. See `TrainingMode` and `Batch` for the others.
    """

    files: Files
    base: int
    autocast: bool
    trained: Sequence[ModelPart] = ()
    adapted: Sequence[str] = ()
    rank: int = 1
    dropout: float = 0.0
    dora: bool = False
    quantised: bool = False
    gradient_checkpointing: bool = False
    eager: bool = False
    liger: bool = False
    padded: bool = False
    windowed: bool = False


def pass_of(shape: ModelShape, mode: TrainingMode, *, padded: bool = False, windowed: bool = False) -> Pass:
    """Return what decides a pass of a model that is trained in a way. padded, windowed: see `Batch`."""
    settings, lora = mode.settings, mode.settings.lora
    matrices = [] if mode.is_full else adapted(shape, mode.trained, lora.target_modules)
    return Pass(
        files=shape.files,
        base=mode.base,
        autocast=mode.autocast,
        trained=sorted(mode.trained) if mode.is_full else [],
        adapted=[matrix.name for matrix in matrices],
        rank=lora.rank,
        dropout=lora.dropout,
        dora=lora.dora,
        quantised=mode.tuner.quantises,
        gradient_checkpointing=mode.gradient_checkpointing,
        eager=settings.attention == "eager",
        liger=settings.liger,
        padded=padded,
        windowed=windowed,
    )


def language_activations(shape: ModelShape, mode: TrainingMode, batch: Batch) -> Activations:
    """Return the bytes of the language model's activations for one batch.

    Raises UnknownModelError if transformers or peft cannot run its layers on tensors without data.
    """
    wanted = pass_of(shape, mode, padded=batch.padded, windowed=batch.windowed)
    try:
        return measured("fake_pass", "measure", wanted, PassMemory).of(batch)
    except VlmflowError as error:
        raise UnknownModelError(error.cause, WITHOUT) from None


def picture_tower(shape: ModelShape, mode: TrainingMode, batch: Batch) -> Pictures:
    """Return the bytes for the pictures of a batch; see `assumed` for a tower that cannot be passed."""
    if not batch.pictures or not shape.of.sees:
        return Pictures(0, 0)
    needed = pictures_of(shape, mode)
    if isinstance(needed, str):
        alike = language_activations(shape, mode, Batch(1, batch.pictures, batch.pictures, 0))
        return Pictures(alike.kept, alike.kept + alike.layer)
    return Pictures(needed.kept.of(batch.pictures), needed.passing.of(batch.pictures))


def assumed(shape: ModelShape, mode: TrainingMode) -> str | None:
    """Return what the estimate assumes of pictures in place of a measurement, for people; None if nothing."""
    needed = pictures_of(shape, mode) if shape.of.sees else None
    if not isinstance(needed, str):
        return None
    return (
        "the picture tower cannot be passed without data, so each picture token is counted in it as much as in the "
        f"language model: {needed}"
    )


def pictures_of(shape: ModelShape, mode: TrainingMode) -> PictureMemory | str:
    """Return what pictures need; a reason for people if the tower cannot be passed."""
    wanted = pass_of(shape, mode)
    parts = {matrix.name: matrix.part for matrix in shape.of.matrices}
    layers = [name for name in wanted.adapted if parts[name] != LANGUAGE]
    trained = [part for part in wanted.trained if part != LANGUAGE]
    if not layers and not trained:  # the tower computes forward alone
        wanted = Pass(files=wanted.files, base=wanted.base, autocast=wanted.autocast)
    else:
        wanted = msgspec.structs.replace(wanted, adapted=layers, trained=trained, eager=False, liger=False)
    try:
        return measured("fake_pass", "measure_pictures", wanted, PictureMemory)
    except VlmflowError as error:
        return error.cause
