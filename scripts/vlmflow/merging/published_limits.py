"""Puts a run's picture limits into the folder of its weights, for all who load them."""

from pathlib import Path

import msgspec

from vlmflow.core.files import remove, sha256_of
from vlmflow.pictures.budget import PictureBudget, ScaleLimits


class LimitedFile(msgspec.Struct, frozen=True):
    """The file of a published folder that holds the picture limits.

    file: its name. proven, published: its SHA-256 in verified/RUN, where it is the base's, and in merged/RUN.
    limits: those in merged/RUN.
    """

    file: str
    proven: str
    published: str
    limits: ScaleLimits


def publish_limits(folder: Path, most_tokens: int) -> LimitedFile | None:
    """Give the processor file of a model the limits of its training, and return what changed.

    folder: the model's files, hard links to those of another folder, which stay as they are.
    most_tokens: the training's `image_max_tokens`.

    Returns None if the model sees no pictures, or scales them by a rule without such limits.
    Raises VlmflowError if the file cannot hold the limits.
    """
    budget = PictureBudget.of(folder, most_tokens)
    processor, limits = budget.processor, budget.limits
    if processor is None or limits is None:
        return None
    file = folder / processor.file
    proven = sha256_of(file)
    remove(file)  # writing would go through the link into the proven file
    file.write_bytes(processor.limited(limits))
    return LimitedFile(processor.file, proven, sha256_of(file), limits)
