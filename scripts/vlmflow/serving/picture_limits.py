"""The picture limits of a run in a model's own files, so that a server scales pictures as the training did.

ms-swift takes its limits from the environment (`swift/child_process`); transformers, vLLM and SGLang take them from the
processor's file, whose `size` is an area in pixels although its keys say edge.
"""

from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json

FEWEST_TOKENS = 4
"""The fewest tokens that a picture gets in training: ms-swift 4.6's default of IMAGE_MIN_TOKEN_NUM."""

NESTED = "processor_config.json", "image_processor"
PLAIN = "preprocessor_config.json"
"""Where transformers 5 looks for a picture processor, in this order (image_processing_base.py)."""


class PictureLimits(msgspec.Struct, frozen=True):
    """The smallest and the largest picture in pixels (width × height); others are scaled to them."""

    shortest_edge: int
    longest_edge: int


def limited_processor(folder: Path, most_tokens: int) -> tuple[str, dict[str, Any], PictureLimits] | None:
    """Return the file that describes a model's picture processor, with a run's limits in its content, and the limits.

    folder: the model's files. most_tokens: the run's train.image_max_tokens.

    Returns None if the model sees no pictures.
    Raises VlmflowError if the processor does not say how many pixels a token has.
    """
    found = _processor_of(folder)
    if found is None:
        return None
    name, content, processor = found
    try:
        side = processor["patch_size"] * processor["merge_size"]
        limits = PictureLimits(FEWEST_TOKENS * side**2, most_tokens * side**2)
    except (KeyError, TypeError):
        raise VlmflowError(
            f"{folder / name}: patch_size and merge_size must be numbers; they give the pixels of a picture token",
            "use a model of the Qwen-VL family",
        ) from None
    processor["size"] = msgspec.to_builtins(limits)
    return name, content, limits


def _processor_of(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Return the name of the file that is read, its content, and the part that describes the picture processor."""
    name, key = NESTED
    if (folder / name).is_file() and isinstance(part := (content := read_json(folder / name)).get(key), dict):
        return name, content, part
    if (folder / PLAIN).is_file():
        content = read_json(folder / PLAIN)
        return PLAIN, content, content
    return None
