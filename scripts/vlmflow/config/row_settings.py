"""What the configuration says of rows and pictures, for the stages that look at them."""

import re
from typing import Annotated, Literal

from pydantic import Field

from vlmflow.config.raw_forms import ANY_ROW
from vlmflow.config.settings import EXPONENT_FORM, Number, Seed, Settings

NOT_IN_COLUMNS = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""What the name of a column may not hold: in JSON it would stand there as an escape."""


class PictureLimits(Settings):
    """What a picture may be; one outside of these limits costs its rows, with the reason counted."""

    min_side: Annotated[int, Field(ge=1), EXPONENT_FORM] = 28
    """Shortest side in pixels: below one patch pair of Qwen-VL (28) the processor refuses the picture."""

    max_aspect: Annotated[Number, Field(ge=1)] = 200.0
    """Longest side over shortest side: Qwen-VL's processor refuses more than 200."""

    max_pixels: Annotated[int, Field(ge=1, le=178_956_970), EXPONENT_FORM] = 40_000_000
    """Width times height: a decompression bomb is refused from its header, before it is decoded. A pixel takes up to
    18 bytes, and resolve_images and hash_pictures declare memory for pictures of the default on all of their cores:
    with more, give both more (--set-resources resolve_images:mem_mb=16000). Above the largest value Pillow refuses the
    picture in the trainer."""

    max_bytes: Annotated[int, Field(ge=1), EXPONENT_FORM] = 100_000_000
    """Size of the file in bytes."""


class RowLimits(Settings):
    """What a row may be; limits on size that keep one broken row from costing a day of training."""

    max_turns: Annotated[int, Field(ge=2), EXPONENT_FORM] = 64
    """Turns in one conversation, human and gpt together; of FIRE in a whole trajectory, in both forms."""

    max_turn_chars: Annotated[int, Field(ge=1), EXPONENT_FORM] = 20_000
    """Characters in one turn."""


class RowChoice(Settings):
    """Which rows of a raw split are used at all; the others are counted as left out, and not looked at further."""

    sources: list[str] | None = None
    """What the rows' `source` may be; null for any."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """How many of these rows, drawn by the seed; null for all."""

    seed: Seed = 0
    """Decides which rows are drawn."""

    modality: Literal["image", "text"] | None = None
    """image: rows with a picture; text: rows without; null for rows that all have one."""

    names: dict[str, str] = {key: key for key in ANY_ROW}
    """What these keys of the rows are called in the file; one that is not here is not read."""

    read_columns: list[str] | None = None
    """The columns that are read where the file is parquet; null for all."""


class NearDuplicates(Settings):
    """What looks like a picture of the test split, or asks, without a picture, what it asks; not byte for byte."""

    picture_distance: Annotated[int, Field(ge=0, le=10), EXPONENT_FORM] = 4
    """Two pictures are near when their perceptual hashes differ in at most this many of 64 bits. Up to 4 they are one
    picture, scaled or compressed anew; from 8 on charts of one template are near."""

    drop: bool = False
    """Reject the train rows of such pictures, and those with such questions, as those of the test split's own pictures
    and prompts are."""
