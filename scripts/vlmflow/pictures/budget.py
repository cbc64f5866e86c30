"""Where the members of a JSON object stand in its text, so that values can change and all other bytes stay.

The picture budget: what a run's `train.image_max_tokens` means for the pictures of its model.

All who scale pictures or count their tokens ask here: lengths, trainers, evaluations, the published and the served
folder, and the estimate.

transformers, vLLM and SGLang take the limits from the processor's file. So does ms-swift, all but Qwen-VL's: these it
takes from the environment (`swift/child_process`). This module alone knows which keys of that file limit the tokens of
a picture: the rules below. Where no rule holds, pictures stay as the processor scales them, in training and everywhere
else, and only ms-swift's template says how many tokens they take (`swift/row_counter`).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from vlmflow.core.errors import VlmflowError

ADVICE = "take the model with the files that its owner published"

Members = dict[str, tuple[int, int]]
"""Where the values of an object's keys begin and end in a text."""


def read_members(file: Path) -> tuple[str, Members]:
    """Return the text of a JSON file, and the members of its object; raises VlmflowError as `members_of`."""
    try:
        text = file.read_bytes().decode()
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: {error}", ADVICE) from None
    return text, members_of(file, text, _blank(text, 0))


def members_of(file: Path, text: str, start: int) -> Members:
    """Return the members of the object that begins at `start` of a valid JSON text.

    Raises VlmflowError, with the file's name, if no object begins there, or it names a key twice.
    """
    if text[start] != "{":
        raise VlmflowError(
            f"{file}: an object must begin at character {start + 1}, not {text[start : start + 9]!r}", ADVICE
        )
    members: Members = {}
    for key, begin, end in _pairs(text, start):
        if key in members:
            raise VlmflowError(f"{file}: names the key {key!r} twice, so readers may take different values", ADVICE)
        members[key] = begin, end
    return members


def _pairs(text: str, start: int) -> Iterator[tuple[str, int, int]]:
    value = json.JSONDecoder().raw_decode
    at = _blank(text, start + 1)
    while text[at] != "}":
        key, at = value(text, at)
        begin = _blank(text, _blank(text, at) + 1)
        _, end = value(text, begin)
        yield key, begin, end
        at = _blank(text, end)
        if text[at] == ",":
            at = _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    """Return the place of the next character that is no JSON white space."""
    while text[at] in " \t\n\r":
        at += 1
    return at


FEWEST_TOKENS = 4
"""The fewest tokens that a picture gets in training: the default of IMAGE_MIN_TOKEN_NUM in qwen_vl_utils and ms-swift
4.6."""

BYTES_PER_TOKEN = 4 * 3 * 2 * 16 * 16 * 4
"""What a loader holds of a picture, as Qwen3-VL's processor makes it: 4 patches per token, each of 3 channels, 2 frames
and 16 x 16 pixels in float32."""

NESTED = "processor_config.json", "image_processor"
PLAIN = "preprocessor_config.json"
"""Where transformers 5 looks for a picture processor, in this order (image_processing_base.py)."""

SIZE, LEAST, MOST, TILES = "size", "min_pixels", "max_pixels", "max_patches"
"""The keys that hold the limits; the second and third, of older files, override the first (transformers 5,
image_processing_qwen2_vl.py)."""

QWEN = "Qwen"
"""What the names of Qwen-VL's classes begin with. Others with its keys (GLM-4.1V) give them another meaning, and
ms-swift limits only Qwen-VL's."""

Pixels = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class ScaleLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of a run's pictures, in the words of the processor's file.

    shortest_edge, longest_edge: the smallest and the largest picture in pixels (width × height, although the names say
    edge); others are scaled to them. longest_edge alone: the longer side in pixels. max_patches: tiles of a picture.
    """

    shortest_edge: int | None = None
    longest_edge: int | None = None
    max_patches: int | None = None

    def by_key(self) -> dict[str, Any]:
        """Return the values by their keys in the processor's file, which are also the loaded processor's."""
        values = msgspec.to_builtins(self)
        return values if TILES in values else {SIZE: values}


class Squares(msgspec.Struct, frozen=True):
    """Scales a picture to an area, and cuts it into squares of one token (Qwen-VL). side: of a square in pixels."""

    side: int

    def limits(self, most_tokens: int) -> tuple[ScaleLimits, int]:
        """Return the limits of a run with `train.image_max_tokens` = most_tokens, and the most tokens within them."""
        return ScaleLimits(FEWEST_TOKENS * self.side**2, most_tokens * self.side**2), most_tokens

    def tokens(self, width: int, height: int, most_tokens: int) -> int:
        """Return the tokens of a picture of width × height pixels; 0 if nothing is left of its shorter side.

        The arithmetic is exactly that of qwen_vl_utils.vision_process.smart_resize, the trainer's; that module imports
        torch, which takes seconds and half a GB in every worker. A test compares the two. transformers' own count
        (`get_number_of_image_patches`) keeps a line of squares where the trainer has nothing left, and stops.
        """
        side = self.side
        rows, columns = max(1, round(height / side)), max(1, round(width / side))
        if rows * columns > most_tokens:
            shrink = math.sqrt((height * width) / (most_tokens * side**2))
            rows, columns = math.floor(height / shrink / side), math.floor(width / shrink / side)
        elif rows * columns < FEWEST_TOKENS:
            stretch = math.sqrt(FEWEST_TOKENS * side**2 / (height * width))
            rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return rows * columns


class Lines(msgspec.Struct, frozen=True):
    """Scales a picture to its longer side, and writes each line of squares with a token for its end (Pixtral).

    side: of a square in pixels. longest_edge: the model's own limit in pixels.
    """

    side: int
    longest_edge: int

    def limits(self, most_tokens: int) -> tuple[ScaleLimits, int]:
        """Return the same as that of `Squares`; n × n squares take n × (n + 1) tokens, and no picture takes more."""
        squares = min((math.isqrt(4 * most_tokens + 1) - 1) // 2, math.ceil(self.longest_edge / self.side))
        return ScaleLimits(longest_edge=min(self.longest_edge, squares * self.side)), squares * (squares + 1)


class Tiles(msgspec.Struct, frozen=True):
    """Cuts a picture into tiles, and adds the whole as one more tile where there are several (GOT-OCR2, InternVL).

    tokens: of a tile, so the fewest of a picture. max_patches: the model's own limit.
    """

    tokens: int
    max_patches: int

    def limits(self, most_tokens: int) -> tuple[ScaleLimits, int]:
        """Return the same as that of `Squares`; a picture takes one tile at least."""
        tiles = min(self.max_patches, max(1, most_tokens // self.tokens - 1))
        return ScaleLimits(max_patches=tiles), self.tokens * (tiles + 1 if tiles > 1 else 1)


class Processor(msgspec.Struct, frozen=True):
    """The picture processor of a model.

    file: the name of the file that describes it. text: the file's content. places: where the values of the keys with
    limits begin and end in the text. rule: how these keys limit a picture's tokens; None if they are not known to.
    """

    file: str
    text: str
    places: Members = {}
    rule: Squares | Lines | Tiles | None = None

    def limited(self, limits: ScaleLimits) -> bytes:
        """Return the file's content with these limits; all other values stay the same, byte for byte."""
        values: dict[str, Any] = {
            SIZE: msgspec.to_builtins(limits),
            LEAST: limits.shortest_edge,
            MOST: limits.longest_edge,
            TILES: limits.max_patches,
        }
        text = self.text
        for key, (start, end) in sorted(self.places.items(), key=lambda item: -item[1][0]):
            text = text[:start] + json.dumps(values[key]) + text[end:]
        return text.encode()


@dataclass(frozen=True)
class PictureBudget:
    """The most tokens of a picture, as a run sets them for its model.

    processor: the model's; None if it sees no pictures. most_tokens: the run's `train.image_max_tokens`.
    """

    processor: Processor | None
    most_tokens: int

    @classmethod
    def of(cls, model: Path, most_tokens: int) -> Self:
        """Return the budget of a run of the model in a folder; raises VlmflowError as `processor_of`."""
        return cls(processor_of(model), most_tokens)

    @property
    def limits(self) -> ScaleLimits | None:
        """The limits of the model's processor; None if it sees no pictures, or no rule is known."""
        return self._rule.limits(self.most_tokens)[0] if self._rule else None

    @property
    def most(self) -> int | None:
        """The most tokens that a picture takes with these limits; None without them."""
        return self._rule.limits(self.most_tokens)[1] if self._rule else None

    @property
    def left_to_processor(self) -> dict[str, Any]:
        """The keys with limits, and their values, that ms-swift does not set itself; {} for Qwen-VL, or no limits."""
        return {} if isinstance(self._rule, Squares) or self.limits is None else self.limits.by_key()

    @property
    def _rule(self) -> Squares | Lines | Tiles | None:
        return self.processor.rule if self.processor else None

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of a picture of width × height pixels.

        0 if the model sees no pictures, or the trainer would leave nothing of this one. 1 if its size alone does not
        give its tokens, so that ms-swift's template gives other lengths, and counts them.
        """
        if isinstance(rule := self._rule, Squares):
            return rule.tokens(width, height, self.most_tokens)
        return 1 if self.processor else 0

    def exceeded(self, largest: int) -> str | None:
        """Return that the setting does not limit the model's pictures, for people; None if it does.

        largest: the most tokens of a picture; 0 if there are none.
        """
        if self.processor is None or not largest:
            return None
        if self._rule is None:
            cause = "does not limit this model's pictures: its processor scales them by a rule of its own"
        elif largest > self.most_tokens:
            cause = "is below the tokens of this model's smallest picture"
        else:
            return None
        return f"train.image_max_tokens: {self.most_tokens} {cause}; a picture takes up to {largest:,} tokens"

    def in_words(self) -> str:
        """Return how pictures are scaled, for a report."""
        if self.processor is None:
            return "no pictures"
        if isinstance(self._rule, Squares):
            return f"{FEWEST_TOKENS} to {self.most_tokens} tokens"
        return json.dumps(self.left_to_processor) if self.left_to_processor else "the model's own"


class _Squares(msgspec.Struct, frozen=True):
    """The used fields of Qwen-VL's picture processor: pixels of a patch's side, and patches along a token's square."""

    patch_size: Pixels
    merge_size: Pixels


class _LongerSide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    longest_edge: Annotated[int, msgspec.Meta(ge=1)]


class _Whole(msgspec.Struct, frozen=True):
    """The used fields of the file of a whole processor: see `Lines` and `Tiles`; the default is transformers'."""

    patch_size: Pixels | None = None
    spatial_merge_size: Pixels = 1
    image_seq_length: Pixels | None = None


def processor_of(folder: Path) -> Processor | None:
    """Return the picture processor of a model that transformers would read; None if the model sees no pictures.

    Raises VlmflowError if the file is not JSON, names a key twice, or has the rule of Qwen-VL and no limits.
    """
    name, key = NESTED
    whole = {}
    if (folder / name).is_file():
        text, members = read_members(folder / name)
        whole = json.loads(text)
        if key in members and not text.startswith("null", members[key][0]):
            return _processor(folder / name, text, members_of(folder / name, text, members[key][0]), whole)
    if (folder / PLAIN).is_file():
        return _processor(folder / PLAIN, *read_members(folder / PLAIN), whole)
    return None


def _processor(file: Path, text: str, members: Members, whole: dict[str, Any]) -> Processor:
    """Return the processor that a file describes. members: its members in the text. whole: the file of `NESTED`."""
    values: dict[str, Any] = {
        key: json.loads(text[slice(*members[key])])
        for key in ("image_processor_type", "patch_size", "merge_size", SIZE, LEAST, MOST, TILES)
        if key in members
    }
    # Transformers 5 does the same.
    kind = str(values.get("image_processor_type", QWEN)).removesuffix("Fast")
    if not kind.startswith(QWEN) or "patch_size" not in values or "merge_size" not in values:
        key, rule = _rule_of_class(kind, values, whole)
        return Processor(file.name, text, {key: members[key]} if rule else {}, rule)
    try:
        squares = msgspec.convert(values, _Squares)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise VlmflowError(f"{file}: {error}; they give the pixels of a picture token", ADVICE) from None
    places = {key: members[key] for key in (SIZE, LEAST, MOST) if values.get(key) is not None}
    if SIZE not in places and not {LEAST, MOST} <= places.keys():
        raise VlmflowError(f"{file}: has no {SIZE}, or {LEAST} and {MOST}, which hold the picture limits", ADVICE)
    return Processor(file.name, text, places, Squares(squares.patch_size * squares.merge_size))


def _rule_of_class(kind: str, values: dict[str, Any], whole: dict[str, Any]) -> tuple[str, Lines | Tiles | None]:
    """Return the key that limits pictures by the code of the processor's class, and how; None if no key does for sure.

    kind: the class. values: of the picture processor's keys. whole: of the whole processor's, which tell the side of a
    square or the tokens of a tile. The class decides because other classes mean something else by the same keys.
    """
    try:
        of_whole = msgspec.convert(whole, _Whole)
        if kind == "PixtralImageProcessor" and of_whole.patch_size:
            size = msgspec.convert(values.get(SIZE), _LongerSide)
            return SIZE, Lines(of_whole.patch_size * of_whole.spatial_merge_size, size.longest_edge)
        if kind == "GotOcr2ImageProcessor" and of_whole.image_seq_length:
            return TILES, Tiles(of_whole.image_seq_length, msgspec.convert(values.get(TILES), Pixels))
    except (msgspec.ValidationError, UnicodeError):  # such as a size with another key
        pass
    return "", None
