"""The floating-point operations of rows in training and evaluation. A multiplication with its addition counts as two.

A row has L tokens, T of them trained, and n pictures with P patches together. For each, forward and backward:

    decoder     (2 + 2) · D · L    D: weights of the linear layers that a token goes through; backward to activations
    adapter     (2 + 4) · A · L    A: weights of the adapter; backward to activations and weights
    attention   (2 + 4) · H · L²   H: layers × width of all queries; queries by keys, and the result by values, each
                                   over the causal half
    output      (2 + 2) · O · T    O: vocabulary × width; only trained tokens need logits
    vision      2 · V · P + 2 · M · P / 4 + 4 · W · P² / n
                                   V: weights of patch embedding and blocks, M: of the mergers, W: depth × width

A part that is trained needs 2 more for its weights, and 2 for the gradient that reaches it. Gradient checkpointing
repeats the forward pass of all layers. Model FLOPs (arXiv:2204.02311, appendix B) leave out this repetition.
`tests/stages/test_work_formula.py` compares the formula with what PyTorch counts.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vlmflow.estimate.parameters import ALIGNER, LANGUAGE, TOWER, adapted, adapter_weights, parts
from vlmflow.estimate.row_lengths import RowLengths
from vlmflow.estimate.shape import ModelShape
from vlmflow.estimate.way import Way


@dataclass(frozen=True)
class Work:
    """Operations per token, per square of a row's tokens, per logit position, per patch, per square of its patches."""

    token: float
    token_square: float
    logit: float
    patch: float
    patch_square: float
    patches_per_token: int

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.token + other.token,
            self.token_square + other.token_square,
            self.logit + other.logit,
            self.patch + other.patch,
            self.patch_square + other.patch_square,
            self.patches_per_token,
        )

    def of_row(self, tokens: int, logits: int, patches: int) -> float:
        """Return the operations of one row."""
        return (
            self.token * tokens
            + self.token_square * tokens**2
            + self.logit * logits
            + self.patch * patches
            + self.patch_square * patches**2
        )

    def of(self, rows: RowLengths) -> float:
        """Return the operations of all rows."""
        return float(self.of_each(rows).sum())

    def of_each(self, rows: RowLengths) -> NDArray[np.float64]:
        """Return the operations of each row, with its pictures as equally large.

        The tower's attention is within a picture.
        """
        tokens, patches = rows.tokens.astype(float), rows.pictures.astype(float) * self.patches_per_token
        operations: NDArray[np.float64] = (
            self.token * tokens
            + self.token_square * np.square(tokens)
            + self.logit * rows.trained.astype(float)
            + self.patch * patches
            + self.patch_square * np.square(patches) / rows.shown
        )
        return operations


def forward(shape: ModelShape, way: Way) -> Work:
    """Return the operations of a forward pass."""
    return _work(shape, way, {LANGUAGE: 2, TOWER: 2, ALIGNER: 2}, adapter=2, attention=2, vision_attention=4)


def model_flops(shape: ModelShape, way: Way) -> Work:
    """Return the operations of forward and backward pass, without those that gradient checkpointing repeats."""
    factors = {part: 2 + (2 if _reached(part, way) else 0) for part in (LANGUAGE, TOWER, ALIGNER)}
    if way.is_full:
        factors = {part: factor + (2 if part in way.trained else 0) for part, factor in factors.items()}
    vision_attention = 4 + (8 if TOWER in way.trained else 0)
    return _work(shape, way, factors, adapter=6, attention=6, vision_attention=vision_attention)


def training(shape: ModelShape, way: Way) -> Work:
    """Return the operations that a GPU really does for forward and backward pass."""
    done = model_flops(shape, way)
    if not way.gradient_checkpointing:
        return done
    again = {LANGUAGE: 2, TOWER: 2 if TOWER in way.trained else 0, ALIGNER: 0}
    repeated = _work(shape, way, again, adapter=2, attention=2, vision_attention=2 * again[TOWER])
    return done + Work(repeated.token, repeated.token_square, 0, repeated.patch, repeated.patch_square, 1)


def _reached(part: str, way: Way) -> bool:
    """Return whether the gradient goes back into a part: the mergers lie between tower and language model."""
    return part == LANGUAGE or part in way.trained or (part == ALIGNER and TOWER in way.trained)


def _work(
    shape: ModelShape, way: Way, factors: dict[str, int], adapter: int, attention: int, vision_attention: int
) -> Work:
    text, vision = shape.text, shape.vision
    language = parts(shape)[LANGUAGE].linear
    if experts := text.experts:
        each = 3 * text.hidden_size * experts.width * experts.per_token + experts.number * text.hidden_size
        language += text.sparse_layers * each
    adapters = _adapters(shape, way, adapter)
    patch = patch_square = 0.0
    if vision:
        tower = sum(one.inputs * one.outputs for one in vision.block) * vision.depth
        tower += vision.patch_values * vision.hidden_size
        mergers = (1 + vision.levels) * sum(one.inputs * one.outputs for one in vision.merger)
        patch = factors[TOWER] * tower + (factors[ALIGNER] * mergers + adapters[ALIGNER]) / vision.patches_per_token
        patch += adapters[TOWER]
        patch_square = float(vision_attention * vision.depth * vision.hidden_size)
    return Work(
        token=factors[LANGUAGE] * language + adapters[LANGUAGE],
        token_square=float(attention * text.num_hidden_layers * text.queries),
        logit=factors[LANGUAGE] * text.vocab_size * text.hidden_size,
        patch=patch,
        patch_square=patch_square,
        patches_per_token=vision.patches_per_token if vision else 1,
    )


def _adapters(shape: ModelShape, way: Way, factor: int) -> dict[str, int]:
    """Return the operations of the adapter by part, per token or patch."""
    if way.is_full:
        return dict.fromkeys((LANGUAGE, TOWER, ALIGNER), 0)
    found = adapted(shape, way.trained, way.adapter.targets)
    return {part: factor * adapter_weights(matrices, way.adapter.rank) for part, matrices in found.items()}
