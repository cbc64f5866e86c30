"""Counts a model's weights and those of an adapter, by part: language model, picture tower, aligner.

The parts are ms-swift's: its freeze_llm, freeze_vit and freeze_aligner freeze one each.
"""

from collections.abc import Collection, Iterable

from vlmflow.config.model_types import ModelPart
from vlmflow.estimate.shape import Matrix, ModelShape

LANGUAGE: ModelPart = "language_model"
TOWER: ModelPart = "vision_tower"
ALIGNER: ModelPart = "aligner"
PARTS = (LANGUAGE, TOWER, ALIGNER)
"""The parts of a model, as `train.freeze` names them."""

ALL_LINEAR = "all-linear"
"""ms-swift's word for the linear layers of every part that is not frozen, but for the output head."""


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
        one
        for one in shape.of.matrices
        if (every and one.listed and one.part in trained) or (not one.parameter and f".{one.name}".endswith(names))
    ]


def adapter_weights(matrices: Iterable[Matrix], rank: int, dora: bool = False) -> int:
    """Return the number of an adapter's weights on some matrices: two factors each, and DoRA's vector of magnitudes.

    Experts that share a parameter have factors each. Source: peft 0.20, tuners/lora/layer.py (`update_layer`,
    `ParamWrapper`) and dora.py.
    """
    return sum(one.count * one.experts * (rank * (one.inputs + one.outputs) + dora * one.outputs) for one in matrices)
