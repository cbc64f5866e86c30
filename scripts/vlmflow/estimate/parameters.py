"""Counts a model's weights and those of an adapter, by part: language model, picture tower, aligner.

The parts are ms-swift's (model_arch.py, `qwen3_vl`): its freeze_llm, freeze_vit and freeze_aligner freeze one each.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vlmflow.estimate.shape import Matrix, ModelShape, TextShape, VisionShape

LANGUAGE, TOWER, ALIGNER = "language_model", "vision_tower", "aligner"
PARTS = (LANGUAGE, TOWER, ALIGNER)
"""The parts of a model, as `train.freeze` names them."""

ALL_LINEAR = "all-linear"
"""ms-swift's word for the linear layers of every part that is not frozen, but for the output head."""


Counted = tuple[tuple[Matrix, int], ...]
"""Matrices, each with its number."""


@dataclass(frozen=True)
class Part:
    """The weights of a part of a model.

    matrices: those of linear layers, with their number. vectors: weights and biases of norms. other: embeddings, the
    output head, experts, and the convolution that cuts patches. convolution: that one, which may have an adapter.
    outside: of a language model, the weights that are in none of its layers.
    """

    matrices: Counted
    vectors: int
    other: int
    convolution: Matrix | None = None
    outside: int = 0

    @property
    def linear(self) -> int:
        """The weights of all linear layers."""
        return sum(matrix.weights * count for matrix, count in self.matrices)

    @property
    def weights(self) -> int:
        """All weights of the part."""
        return self.linear + self.vectors + self.other


def parts(shape: ModelShape) -> dict[str, Part]:
    """Return the parts of a model by name; LANGUAGE alone if it has no tower."""
    found = {LANGUAGE: _language(shape.text, shape.tied)}
    if shape.vision:
        found |= {TOWER: _tower(shape.vision), ALIGNER: _aligner(shape.vision)}
    return found


def weights_of(shape: ModelShape) -> int:
    """Return the number of all weights of a model."""
    return sum(part.weights for part in parts(shape).values())


def trained_weights(shape: ModelShape, trained: Collection[str]) -> int:
    """Return the number of weights that full fine-tuning changes. trained: the parts that are not frozen."""
    return sum(part.weights for name, part in parts(shape).items() if name in trained)


def adapted(shape: ModelShape, trained: Collection[str], targets: Iterable[str]) -> dict[str, Counted]:
    """Return the matrices that get an adapter, with their number, by part.

    trained: the parts that are not frozen. targets: names as in `train.lora.target_modules`. Names other than
    ALL_LINEAR match in every part, as peft matches them.
    """
    names = set(targets)
    found = {}
    for name, part in parts(shape).items():
        every = ALL_LINEAR in names and name in trained
        chosen = tuple(one for one in part.matrices if every or one[0].name in names)
        if part.convolution and part.convolution.name in names:  # no linear layer, so all-linear leaves it out
            chosen += ((part.convolution, 1),)
        found[name] = chosen
    return found


def adapter_weights(matrices: Counted, rank: int, dora: bool = False) -> int:
    """Return the number of an adapter's weights on some matrices: two factors each, and DoRA's vector of magnitudes.

    Source: peft 0.20, tuners/lora/layer.py (`update_layer`) and dora.py.
    """
    return sum(count * (rank * (one.inputs + one.outputs) + dora * one.outputs) for one, count in matrices)


def _language(text: TextShape, tied: bool) -> Part:
    layers, dense, sparse = text.num_hidden_layers, text.dense_layers, text.sparse_layers
    matrices = [(matrix, layers) for matrix in text.attention]
    if dense:
        matrices += [(matrix, dense) for matrix in text.mlp]
    table = text.vocab_size * text.hidden_size
    tables = other = table if tied else 2 * table
    if experts := text.experts:
        each = experts.number * 3 * text.hidden_size * experts.width
        router = experts.number * text.hidden_size
        other += sparse * (each + router)
    norms = layers * (2 * text.hidden_size + 2 * text.head_width) + text.hidden_size
    return Part(tuple(matrices), norms, other, outside=tables + text.hidden_size)


def _tower(vision: VisionShape) -> Part:
    width = vision.hidden_size
    patches = Matrix("proj", vision.patch_values, width, bias=True)
    positions = vision.num_position_embeddings * width
    blocks = tuple((matrix, vision.depth) for matrix in vision.block)
    return Part(blocks, vision.depth * 4 * width, patches.weights + positions, patches)


def _aligner(vision: VisionShape) -> Part:
    width, merged = vision.hidden_size, vision.hidden_size * vision.patches_per_token
    matrices = tuple((matrix, 1 + vision.levels) for matrix in vision.merger)
    return Part(matrices, 2 * width + vision.levels * 2 * merged, 0)
