"""The floating-point operations of rows in training and evaluation. A multiplication with its addition counts as two.

A row has L tokens, T of them trained, and n pictures with P tokens together. For each, forward and backward:

    decoder     (2 + 2) · D · L    D: weights of the matrices that a token goes through; backward to activations
    adapter     (2 + 4) · A · L    A: weights of the adapter; backward to activations and weights
    attention   (2 + 4) · H · L²   H: width of all queries, over all layers; queries by keys, and the result by values,
                                   each over the causal half; a window is not counted as less
    output      (2 + 2) · O · T    O: weights of the head; only trained tokens need logits
    pictures    a · P + b · P² / n what PyTorch counts in a pass of the tower (`picture_pass`)

A part that is trained needs 2 more for its weights, and 2 for the gradient that reaches it. Gradient checkpointing
repeats the forward pass of all layers. Model FLOPs (arXiv:2204.02311, appendix B) leave out this repetition.
`tests/stages/test_work_formula.py` compares the formula with what PyTorch counts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmflow.estimate.parameters import LANGUAGE, adapted, adapter_weights
from vlmflow.estimate.pass_memory import Line, pictures_of
from vlmflow.estimate.row_lengths import RowLengths
from vlmflow.estimate.shape import ModelShape
from vlmflow.estimate.training_mode import TrainingMode


@dataclass(frozen=True)
class Work:
    """Operations per token, per square of a row's tokens, per logit position, per picture token, and per square."""

    token: float
    token_square: float
    logit: float
    picture: float
    picture_square: float

    def of(self, rows: RowLengths) -> float:
        """Return the operations of all rows."""
        return float(self.of_each(rows).sum())

    def of_each(self, rows: RowLengths) -> NDArray[np.float64]:
        """Return the operations of each row, with its pictures as equally large.

        The tower's attention is within a picture.
        """
        tokens, pictures = rows.tokens.astype(float), rows.pictures.astype(float)
        operations: NDArray[np.float64] = (
            self.token * tokens
            + self.token_square * np.square(tokens)
            + self.logit * rows.trained.astype(float)
            + self.picture * pictures
            + self.picture_square * np.square(pictures) / rows.shown
        )
        return operations


def forward(shape: ModelShape, mode: TrainingMode) -> Work:
    """Return the operations of a forward pass."""
    return _work(shape, mode, passes=1, backward=False)


def training(shape: ModelShape, mode: TrainingMode) -> Work:
    """Return the operations that a GPU really does for forward and backward pass."""
    return _work(shape, mode, passes=2 if mode.gradient_checkpointing else 1, backward=True)


def _work(shape: ModelShape, mode: TrainingMode, passes: int, backward: bool) -> Work:
    """Return the operations of a pass. passes: how often the layers are computed forward."""
    size = shape.of
    language = sum(
        one.count * one.weights * one.active / one.experts
        for one in size.matrices
        if one.in_layers and one.part == LANGUAGE
    )
    own_weights = 2 if mode.is_full and LANGUAGE in mode.trained else 0
    back = 2 + own_weights if backward else 0
    matrices = [] if mode.is_full else adapted(shape, mode.trained, mode.adapter.targets)
    adapter = adapter_weights((one for one in matrices if one.part == LANGUAGE), mode.adapter.rank)
    both = 4 if backward else 0
    token = (2 * passes + back) * language + (2 * passes + both) * adapter
    pictures = _pictures(shape, mode, backward)
    return Work(
        token=token,
        token_square=float((2 * passes + both) * size.attention),
        logit=(2 + back) * size.head,
        picture=token if pictures is None else pictures.token,
        picture_square=0.0 if pictures is None else pictures.square,
    )


def _pictures(shape: ModelShape, mode: TrainingMode, backward: bool) -> Line | None:
    """Return the operations for pictures; None if they count as in the language model (`pass_memory.assumed`)."""
    if not shape.of.sees:
        return Line(0, 0)
    found = pictures_of(shape, mode)
    if isinstance(found, str):
        return None
    return found.training if backward else found.forward
