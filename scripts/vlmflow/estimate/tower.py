"""The bytes and operations that pictures need before the language model gets them."""

from dataclasses import dataclass

from vlmflow.estimate.pass_memory import Batch, language_activations, pictures_of
from vlmflow.estimate.shape import ModelShape
from vlmflow.estimate.training_mode import TrainingMode


@dataclass(frozen=True)
class Pictures:
    """Bytes of the tower. kept: until the backward pass reaches it. passing: at most, while the tower computes."""

    kept: int
    passing: int


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
    if not shape.of.sees:
        return None
    found = pictures_of(shape, mode)
    if not isinstance(found, str):
        return None
    return (
        "the picture tower cannot be passed without data, so each picture token is counted in it as much as in the "
        f"language model: {found}"
    )
