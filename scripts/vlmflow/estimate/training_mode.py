"""How a model is trained, in the plain values that decide memory and time; `inputs_of` maps settings to them."""

from dataclasses import dataclass
from typing import Literal

from vlmflow.config.model_types import ModelPart
from vlmflow.config.tuners import tuner_of
from vlmflow.estimate.parameters import ALL_LINEAR, LANGUAGE

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

    tuner: its name in `config.tuners`. trained: the parts that are not frozen (`parameters.PARTS`). half: matrix
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
