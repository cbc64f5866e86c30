"""How a model is trained, in the plain values that decide memory and time; `inputs_of` maps settings to them.

The bytes that a training keeps between its steps, on each GPU: weights, adapter, gradients, optimizer.

Sources: transformers and torch for ddp (AdamW keeps its moments in the weights' type, float32 here; DDP's reducer has a
copy of all gradients in buckets); DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, with ms-swift's
zero2.json and zero3.json; bitsandbytes for 4 bits.
"""

import math
from dataclasses import dataclass
from typing import Literal

from vlmflow.config.model_types import ModelPart
from vlmflow.config.strategies import tuner_of
from vlmflow.estimate.shape import (
    ALL_LINEAR,
    LANGUAGE,
    ModelShape,
    adapted,
    adapter_weights,
    trained_weights,
    weights_of,
)

Engine = Literal["ddp", "deepspeed", "fsdp2"]

BF16, FP32 = 2, 4
"""Bytes of a number. float16 takes as many as bfloat16."""

ABSMAX_BITS, DOUBLE_ABSMAX_BITS = 32 / 64, 8 / 64 + 32 / (64 * 256)
"""Bits per weight for the scales of 4-bit blocks of 64 weights: float32, or 8 bits with a float32 for every 256 of them
(bitsandbytes, `quantize_blockwise` and `nested`; arXiv:2305.14314, section 3)."""


@dataclass(frozen=True)
class Sharding:
    """What the processes share, and who trains.

    engine: the library that distributes. weights, gradients, optimizer: into how many parts each is cut; 1 means that
    every GPU holds all of it. second_copy: how many GPUs of a node share a second copy of the weights; 0 without one.
    optimizer_on_host, weights_on_host: kept in main memory instead.
    """

    engine: Engine = "ddp"
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    second_copy: int = 0
    optimizer_on_host: bool = False
    weights_on_host: bool = False


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, as `train.lora` describes it. targets: see `parameters.adapted`."""

    rank: int = 16
    dropout: float = 0.05
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dora: bool = False


@dataclass(frozen=True)
class TrainingMode:
    """How a model is trained, as far as memory and time depend on it.

    tuner: its name in `config.strategies`. trained: the parts that are not frozen (`parameters.PARTS`). half: matrix
    products are in 16 bits, as in every training but one with dtype float32. double_quant: of QLoRA's scales.
    eager: attention without a fused kernel. liger: logits are computed in pieces. processes: those of all nodes.
    nodes: machines, each with as many processes. network: bytes per second that a node sends to the others, at most.
    """

    tuner: str = "lora"
    trained: frozenset[ModelPart] = frozenset({LANGUAGE})
    adapter: Adapter = Adapter()
    sharding: Sharding = Sharding()
    processes: int = 1
    nodes: int = 1
    network: float = 100e9 / 8
    half: bool = True
    double_quant: bool = True
    gradient_checkpointing: bool = True
    eager: bool = False
    liger: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the base's own weights are trained."""
        return not tuner_of(self.tuner).trains_adapter

    @property
    def quantised(self) -> bool:
        """Whether the linear layers of the language model are in 4 bits."""
        return tuner_of(self.tuner).quantises

    @property
    def autocast(self) -> bool:
        """Whether torch.autocast chooses the types; DeepSpeed and FSDP2 cast the weights instead."""
        return self.half and self.sharding.engine == "ddp"

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products, also in those of the adapter."""
        return BF16 if self.half else FP32

    @property
    def base(self) -> int:
        """Bytes of a weight of the base, unless it is quantised. Under ddp, full fine-tuning loads float32 weights."""
        if not self.half:
            return FP32
        return FP32 if self.is_full and self.sharding.engine == "ddp" else BF16

    @property
    def trained_bytes(self) -> int:
        """Bytes of a weight that is trained, without the optimizer's own copy.

        peft keeps adapters in float32; DeepSpeed casts them to the run's type; FSDP2 keeps float32 shards.
        """
        return BF16 if self.half and self.sharding.engine == "deepspeed" else FP32

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient: those of its weight (DeepSpeed: `gradient_accumulation_dtype`)."""
        return self.trained_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's state for a weight: two moments, and DeepSpeed's float32 copy of a 16-bit weight."""
        master = FP32 if self.trained_bytes < FP32 else 0
        return master + 2 * FP32


ZERO2_BUCKET = 200_000_000
"""Elements of the buffer in which ZeRO-2 reduces gradients (ms-swift's zero2.json, `reduce_bucket_size`)."""

MAX_LIVE = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered at a time (ms-swift's zero3.json, `stage3_max_live_parameters`)."""

SUB_GROUP = 1_000_000_000
"""Weights that ZeRO-3 updates at a time (ms-swift's zero3.json, `sub_group_size`)."""

PREFETCHED_LAYERS = 2
"""Layers that FSDP2 holds gathered: the one that computes, and the next one."""


@dataclass(frozen=True)
class States:
    """Bytes on one GPU. host: bytes in the main memory of the machine for each process, with offload.

    weights: of the base, and with hpZ a second copy of all weights. gathered: buffers for weights that others hold, and
    for reducing gradients. step: copies of gradients that exist in an optimizer step alone.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    gathered: int
    step: int
    host: int


def trained_of(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the number of weights that are trained: the adapter's, or the base's own."""
    if mode.is_full:
        return trained_weights(shape, mode.trained)
    found = adapted(shape, mode.trained, mode.adapter.targets)
    return adapter_weights(found, mode.adapter.rank, mode.adapter.dora)


def base_bytes(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the bytes of the base's weights on all GPUs together, each weight once."""
    quantised = quantised_weights(shape, mode)
    bits = 4 + (DOUBLE_ABSMAX_BITS if mode.double_quant else ABSMAX_BITS)
    trained = trained_weights(shape, mode.trained) if mode.is_full else 0
    frozen = weights_of(shape) - trained - quantised
    return math.ceil(frozen * mode.base + trained * mode.trained_bytes + quantised * bits / 8)


def quantised_weights(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the number of the base's weights that are in 4 bits: the language model's linear layers, or none."""
    matrices = [one for one in shape.of.matrices if one.linear and one.part == LANGUAGE]
    return sum(one.weights * one.count for one in matrices) if mode.quantised else 0


def states(shape: ModelShape, mode: TrainingMode) -> States:
    """Return what each GPU holds between two steps."""
    sharding = mode.sharding
    trained = trained_of(shape, mode)
    base_of_all, adapter_of_all = base_bytes(shape, mode), 0 if mode.is_full else trained * mode.trained_bytes
    base = math.ceil(base_of_all / sharding.weights)
    if sharding.second_copy:  # DeepSpeed, runtime/zero/partition_parameters.py, `_partition_param_sec`
        base += math.ceil((base_of_all + adapter_of_all) / sharding.second_copy)
    adapter = math.ceil(adapter_of_all / sharding.weights)
    optimizer = math.ceil(trained * mode.optimizer_bytes / sharding.optimizer)
    weights_here = 0 if sharding.weights_on_host else 1
    optimizer_here = 0 if sharding.optimizer_on_host else 1
    return States(
        weights=base * weights_here,
        adapter=adapter * weights_here,
        gradients=_gradients(trained, mode) * optimizer_here,
        optimizer=optimizer * optimizer_here,
        gathered=_gathered(shape, trained, mode),
        step=_step(trained, mode) * optimizer_here,
        host=(base + adapter) * (1 - weights_here) + (optimizer + _gradients(trained, mode)) * (1 - optimizer_here),
    )


def _gradients(trained: int, mode: TrainingMode) -> int:
    return math.ceil(trained * mode.gradient_bytes / mode.sharding.gradients)


def _step(trained: int, mode: TrainingMode) -> int:
    """Return the bytes of DeepSpeed's copies of gradients: a flat one, and that in float32.

    ZeRO 3 makes them for a sub-group of weights at a time (stage3.py:2686, `_prepare_fp32_grad_for_sub_group`), ZeRO 1
    and 2 for all of the process (stage_1_and_2.py:3117, `step`).
    """
    if mode.sharding.engine != "deepspeed":
        return 0
    own = math.ceil(trained / mode.sharding.optimizer)
    if mode.sharding.weights > 1:
        own = min(own, SUB_GROUP)
    return own * (mode.gradient_bytes + (FP32 if mode.gradient_bytes < FP32 else 0))


def _gathered(shape: ModelShape, trained: int, mode: TrainingMode) -> int:
    """Return the bytes of buffers that the engine itself needs."""
    sharding = mode.sharding
    if sharding.engine == "ddp":
        return trained * mode.gradient_bytes if mode.processes > 1 else 0
    if sharding.engine == "fsdp2":
        return _gathered_by_fsdp2(shape, mode)
    if sharding.weights == 1 and not sharding.weights_on_host:
        return ZERO2_BUCKET * mode.gradient_bytes
    live = min(weights_of(shape), MAX_LIVE + shape.of.head) * mode.compute
    return live + shape.of.width**2 * mode.gradient_bytes


def _gathered_by_fsdp2(shape: ModelShape, mode: TrainingMode) -> int:
    """Return the bytes of two layers, and of the weights outside all layers, which stay gathered."""
    in_layers = shape.of.weights[LANGUAGE] - shape.of.outside
    layer, outside = math.ceil(in_layers / shape.of.layers), weights_of(shape) - in_layers
    gradients = PREFETCHED_LAYERS * layer * FP32 if mode.is_full else 0
    return (PREFETCHED_LAYERS * layer + outside) * BF16 + gradients
