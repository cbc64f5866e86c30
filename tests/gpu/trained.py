"""The result of a training, to measure and merge, from either trainer."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trained:
    """A short training on one device.

    trainer: its description. adapter: the folder with its adapter. losses: one per optimizer step, warm-up included.
    seconds, tokens: of the steps after the warm-up; padding is not counted. positions: computed in them, including
    padding. allocated, reserved: the most bytes on the GPU. None: not known of this trainer or device.
    """

    trainer: str
    adapter: Path
    losses: list[float]
    seconds: float
    tokens: int
    positions: int | None
    allocated: int | None
    reserved: int | None
