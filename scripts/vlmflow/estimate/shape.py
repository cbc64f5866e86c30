"""The sizes of a model that decide its memory and its work, read from its config.json.

Known are Qwen3 and Qwen3-VL, dense and with experts, as transformers 5.19 builds them (models/qwen3, qwen3_moe,
qwen3_vl, qwen3_vl_moe).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vlmflow.core.errors import VlmflowError

CONFIG = "config.json"

TEXT, VISION = ("qwen3", "qwen3_moe"), ("qwen3_vl", "qwen3_vl_moe")
KNOWN = (*TEXT, *VISION)
"""Values of `model_type` in a known model's config.json."""

DENSE_DEFAULTS = {"head_dim": 128}
"""The default of transformers' classes for dense models; those with experts divide the width by the heads."""

SPARSE_DEFAULTS = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_vl_moe": {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
}
"""The same for models with experts, by `model_type` (Qwen3MoeConfig, Qwen3VLMoeTextConfig)."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
"""Of layers; the largest models have fewer than 200."""
Optional = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class UnknownModelError(VlmflowError):
    """The estimate does not know this architecture; a run of it trains without an estimate."""


@dataclass(frozen=True)
class Matrix:
    """The weights of a linear layer. inputs, outputs: its widths. bias: whether it adds a vector of `outputs`."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """The number of weights, with the bias."""
        return self.inputs * self.outputs + self.bias * self.outputs


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: their number, how many each token goes through, and the width inside each."""

    number: int
    per_token: int
    width: int


class TextShape(msgspec.Struct, frozen=True, kw_only=True):
    """The language model. Keys and defaults are those of transformers' Qwen3Config and Qwen3VLTextConfig."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size | None = None
    attention_bias: bool = False
    num_experts: Optional = 0
    num_local_experts: Optional = 0  # the same, as transformers 5 writes it
    num_experts_per_tok: Optional = 0
    moe_intermediate_size: Optional = 0
    decoder_sparse_step: Size = 1
    mlp_only_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.head_width:
            raise ValueError("num_attention_heads is more than hidden_size, and head_dim is missing")
        if self.experts and not (self.experts.per_token and self.experts.width):
            raise ValueError("num_experts_per_tok and moe_intermediate_size of experts must be at least 1")

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def queries(self) -> int:
        """The width of all queries."""
        return self.num_attention_heads * self.head_width

    @property
    def keys(self) -> int:
        """The width of all keys; also that of all values."""
        return self.num_key_value_heads * self.head_width

    @property
    def experts(self) -> Experts | None:
        """The experts of a layer that has some."""
        number = self.num_experts or self.num_local_experts
        if not number:
            return None
        return Experts(number, self.num_experts_per_tok, self.moe_intermediate_size)

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts (modeling_qwen3_moe.py, `Qwen3MoeDecoderLayer`)."""
        if self.experts is None:
            return 0
        dense = set(self.mlp_only_layers or ())
        numbers = range(self.num_hidden_layers)
        return sum(number not in dense and (number + 1) % self.decoder_sparse_step == 0 for number in numbers)

    @property
    def dense_layers(self) -> int:
        """The number of layers without experts."""
        return self.num_hidden_layers - self.sparse_layers

    @property
    def attention(self) -> list[Matrix]:
        """The matrices of one layer's attention."""
        bias = self.attention_bias
        return [
            Matrix("q_proj", self.hidden_size, self.queries, bias),
            Matrix("k_proj", self.hidden_size, self.keys, bias),
            Matrix("v_proj", self.hidden_size, self.keys, bias),
            Matrix("o_proj", self.queries, self.hidden_size, bias),
        ]

    @property
    def mlp(self) -> list[Matrix]:
        """The matrices of one dense layer's MLP."""
        width, inner = self.hidden_size, self.intermediate_size
        return [Matrix(name, width, inner) for name in ("gate_proj", "up_proj")] + [Matrix("down_proj", inner, width)]


class VisionShape(msgspec.Struct, frozen=True, kw_only=True):
    """The picture tower. Keys and defaults are those of transformers' Qwen3VLVisionConfig."""

    depth: Count = 27
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    num_heads: Size = 16
    in_channels: Size = 3
    patch_size: Size = 16
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    out_hidden_size: Size = 3584
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: Sequence[int] = (8, 16, 24)

    @property
    def patches_per_token(self) -> int:
        """The number of patches that become one token."""
        return self.spatial_merge_size**2

    @property
    def patch_values(self) -> int:
        """The numbers of one patch: its pixels."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def levels(self) -> int:
        """How many inner layers also give features to the language model."""
        return len(self.deepstack_visual_indexes)

    @property
    def block(self) -> list[Matrix]:
        """The matrices of one block."""
        width, inner = self.hidden_size, self.intermediate_size
        return [
            Matrix("qkv", width, 3 * width, bias=True),
            Matrix("proj", width, width, bias=True),
            Matrix("linear_fc1", width, inner, bias=True),
            Matrix("linear_fc2", inner, width, bias=True),
        ]

    @property
    def merger(self) -> list[Matrix]:
        """The matrices of one merger: the tower's last layer, and one for each of `levels`."""
        merged = self.hidden_size * self.patches_per_token
        return [
            Matrix("linear_fc1", merged, merged, bias=True),
            Matrix("linear_fc2", merged, self.out_hidden_size, bias=True),
        ]


@dataclass(frozen=True)
class ModelShape:
    """A model: its language model, its picture tower if it has one, and whether head and embedding are one matrix."""

    text: TextShape
    vision: VisionShape | None
    tied: bool


def read_shape(model: Path) -> ModelShape:
    """Read a model's sizes from the config.json in its folder.

    Raises UnknownModelError for another architecture, VlmflowError if a size is missing or no number.
    """
    file = model / CONFIG
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        architecture = config.get("model_type")
        if architecture not in KNOWN:
            raise UnknownModelError(
                f"{file}: model_type is {architecture!r}; the estimate knows {', '.join(KNOWN)}",
                "train without an estimate: the smoke run shows whether the longest rows fit",
            )
        inner = config if architecture in TEXT else msgspec.convert(config.get("text_config"), dict[str, Any])
        text = msgspec.convert(_defaults(architecture, inner) | inner, TextShape)
        vision = msgspec.convert(config.get("vision_config"), VisionShape) if architecture in VISION else None
        tied = bool(config.get("tie_word_embeddings", False))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise VlmflowError(
            f"{file}: {error}", "take a Qwen3 or Qwen3-VL model with the files that its owner published"
        ) from None
    return ModelShape(text, vision, tied)


def _defaults(architecture: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that transformers uses where the config.json has none. given: the language model's keys."""
    if architecture not in SPARSE_DEFAULTS:
        return DENSE_DEFAULTS
    own_name = "num_local_experts" in given
    return {key: size for key, size in SPARSE_DEFAULTS[architecture].items() if not (own_name and key == "num_experts")}
