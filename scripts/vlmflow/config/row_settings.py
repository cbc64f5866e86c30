"""The settings of rows and pictures, for the stages that check them."""

import re
from typing import Annotated, Literal

from pydantic import Field

from vlmflow.config.raw_forms import ANY_ROW
from vlmflow.config.settings import EXPONENT_FORM, MOST, Number, Positive, Seed, Settings

NOT_IN_COLUMNS = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""Characters that the name of a column must not contain: JSON would escape them, or cannot have them."""

GOOD = 8
"""The score from which an attempt is good: at 8, FIRE's own dialogues end (arXiv:2407.11522)."""


class PictureLimits(Settings):
    """Limits on pictures; rows with a picture outside these limits are rejected, and the reason is counted."""

    min_side: Annotated[int, Field(ge=17)] = 28
    """Shortest side in pixels. Below 17 (half a picture token of Qwen3-VL) transformers scales a picture otherwise than
    the trainer."""

    max_aspect: Annotated[Number, Field(ge=1, le=200)] = 200.0
    """Longest side over shortest side: Qwen-VL's processor refuses more than 200."""

    max_pixels: Annotated[int, Field(ge=1, le=178_956_970), EXPONENT_FORM] = 40_000_000
    """Width times height: a decompression bomb is refused by its header, before decoding. A pixel takes up to 18 bytes,
    and resolve_images and hash_pictures request memory for pictures of the default size on all cores: for larger ones,
    give both more (--set-resources resolve_images:mem_mb=16000). Above the largest allowed value, Pillow refuses the
    picture in the trainer."""

    max_bytes: Positive = 100_000_000
    """Size of the file in bytes."""


class RowLimits(Settings):
    """Limits on the size of rows, which keep one broken row from wasting a day of training."""

    max_turns: Annotated[int, Field(ge=2, le=MOST), EXPONENT_FORM] = 64
    """Turns in one conversation, of all speakers together; for FIRE, in a whole trajectory, in both forms."""

    max_turn_chars: Positive = 20_000
    """Characters in one turn, and in the declarations of a row's tools."""

    max_pictures: Positive = 16
    """Pictures in one row."""


Take = Literal["chosen", True] | None
"""Which answers of preference data are used: see `data_settings.DatasetSettings.take`."""


class RowChoice(Settings):
    """Which rows of a raw split are used; the others are counted as left out, and not checked further."""

    sources: list[str] | None = None
    """Allowed values of the rows' `source`; null for any."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """How many of these rows, drawn by the seed; null for all."""

    seed: Seed = 0
    """Decides which rows are drawn."""

    modality: Literal["image", "text"] | None = None
    """image: rows with a picture; text: rows without; null for all."""

    names: dict[str, str] = {key: key for key in ANY_ROW}
    """The names of these keys in the file; a key that is not here is not read."""

    kind: str | None = None
    """The kind of the rows, if their turns may name pictures, too: `names` then has all of its keys."""

    take: Take = None
    """The answers of preference data that are used; see docs/data.md."""

    frames: int | None = None
    """See `data_settings.DatasetSettings.frames_as_pictures`."""

    read_columns: list[str] | None = None
    """The columns to read from a parquet file; null for all."""

    @property
    def takes_all(self) -> bool:
        """Whether all rows of the modality are used."""
        return self.sources is None and self.samples is None and self.take is not True


class NearDuplicates(Settings):
    """Pictures that look like one in the test split, and rows without a picture that ask nearly the same question."""

    picture_distance: Annotated[int, Field(ge=0, le=10), EXPONENT_FORM] = 4
    """Two pictures are near when their perceptual hashes differ in at most this many of 64 bits. Up to 4, they are the
    same picture, scaled or compressed differently; from 8 on, charts of one template are near."""

    drop: bool = False
    """Reject the train rows with such pictures or questions, like those with the test split's own pictures and
    prompts."""
