"""What the configuration says of one data set."""

from typing import Annotated, Literal

from pydantic import Field

from vlmflow.config.settings import EXPONENT_FORM, Number, Seed, Settings, Share


class PictureLimits(Settings):
    """What a picture may be; one outside of these limits costs its rows, with the reason counted."""

    min_side: Annotated[int, Field(ge=1), EXPONENT_FORM] = 28
    """Shortest side in pixels: below one patch pair of Qwen-VL (28) the processor refuses the picture."""

    max_aspect: Annotated[Number, Field(ge=1)] = 200.0
    """Longest side over shortest side: Qwen-VL's processor refuses more than 200."""

    max_pixels: Annotated[int, Field(ge=1, le=178_956_970), EXPONENT_FORM] = 100_000_000
    """Width times height: a decompression bomb is refused from its header, before it is decoded. Above the
    largest value Pillow refuses the picture in the trainer."""

    max_bytes: Annotated[int, Field(ge=1), EXPONENT_FORM] = 100_000_000
    """Size of the file in bytes."""


class RowLimits(Settings):
    """What a row may be; limits on size that keep one broken row from costing a day of training."""

    max_turns: Annotated[int, Field(ge=2), EXPONENT_FORM] = 64
    """Turns in one conversation, human and gpt together."""

    max_turn_chars: Annotated[int, Field(ge=1), EXPONENT_FORM] = 20_000
    """Characters in one turn."""


class DatasetSettings(Settings):
    """One data set: where its raw files and pictures are, and how rows are made of them."""

    kind: Literal["fire", "volcano", "alpaca"]
    """The raw form, which names the converter (`convert_<kind>`)."""

    train: str
    """The raw train split: hf://datasets/OWNER/NAME/FILE (pinned in pins.yaml), file:///PATH, or a path."""

    test: str | None = None
    """The raw test split, in the same forms; it stays untouched until evaluation."""

    image_roots: list[str] = []
    """Folders that hold the pictures under the paths that the rows name; the first that has one wins."""

    form: Literal["trajectory", "timestep"] = "trajectory"
    """trajectory: a conversation per raw row, every answer trained. timestep: an example per attempt, whose
    state is the question and the last attempts with their feedback, and whose last answer alone is trained."""

    max_history_rounds: Annotated[int, Field(ge=0), EXPONENT_FORM] | None = 6
    """Timestep form: how many earlier attempts stand in an example's state; null for all of them."""

    val_share: Annotated[Number, Field(gt=0, lt=1)] = 0.02
    """Share of the raw train split that is held out, by picture, to choose checkpoints."""

    seed: Seed = 42
    """Decides which pictures are held out."""

    max_reject_share: Share = 0.05
    """Largest share of a split's rows that may be rejected; duplicates and leaks do not count toward it."""

    picture_limits: PictureLimits = PictureLimits()
    row_limits: RowLimits = RowLimits()
