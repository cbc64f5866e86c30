"""The picture limits of a run in a model's own files, so that all who read them scale pictures as the training did.

transformers, vLLM and SGLang take the limits from the processor's file. So does ms-swift, all but Qwen-VL's: these it
takes from the environment (`swift/child_process`). This module alone knows that file, and which of its keys limit the
tokens of a picture: the rules below. Where no rule holds, pictures stay as the processor scales them, in training and
everywhere else.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vlmflow.core.errors import VlmflowError

FEWEST_TOKENS = 4
"""The fewest tokens that a picture gets in training: the default of IMAGE_MIN_TOKEN_NUM in qwen_vl_utils and ms-swift
4.6."""

NESTED = "processor_config.json", "image_processor"
PLAIN = "preprocessor_config.json"
"""Where transformers 5 looks for a picture processor, in this order (image_processing_base.py)."""

SIZE, LEAST, MOST, TILES = "size", "min_pixels", "max_pixels", "max_patches"
"""The keys that hold the limits; the second and third, of older files, override the first (transformers 5,
image_processing_qwen2_vl.py)."""

QWEN = "Qwen"
"""What the names of Qwen-VL's classes begin with. Others with its keys (GLM-4.1V) give them another meaning, and
ms-swift limits only Qwen-VL's."""

ADVICE = "take the model with the files that its owner published"

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

    def limits(self, most_tokens: int) -> ScaleLimits:
        """Return the limits of a run with `train.image_max_tokens` = most_tokens."""
        return ScaleLimits(FEWEST_TOKENS * self.side**2, most_tokens * self.side**2)


class Lines(msgspec.Struct, frozen=True):
    """Scales a picture to its longer side, and writes each line of squares with a token for its end (Pixtral).

    side: of a square in pixels. longest_edge: the model's own limit in pixels.
    """

    side: int
    longest_edge: int

    def limits(self, most_tokens: int) -> ScaleLimits:
        """Return the limits; with them, n × n squares take n × (n + 1) tokens, and no picture takes more."""
        squares = (math.isqrt(4 * most_tokens + 1) - 1) // 2
        return ScaleLimits(longest_edge=min(self.longest_edge, squares * self.side))


class Tiles(msgspec.Struct, frozen=True):
    """Cuts a picture into tiles, and adds the whole as one more tile where there are several (GOT-OCR2, InternVL).

    tokens: of a tile, so the fewest of a picture. max_patches: the model's own limit.
    """

    tokens: int
    max_patches: int

    def limits(self, most_tokens: int) -> ScaleLimits:
        """Return the limits; a picture takes one tile at least."""
        return ScaleLimits(max_patches=min(self.max_patches, max(1, most_tokens // self.tokens - 1)))


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


class Processor(msgspec.Struct, frozen=True):
    """The picture processor of a model.

    file: the name of the file that describes it. text: the file's content. places: where the values of the keys with
    limits begin and end in the text. rule: how these keys limit a picture's tokens; None if they are not known to.
    """

    file: str
    text: str
    places: dict[str, tuple[int, int]] = {}
    rule: Squares | Lines | Tiles | None = None

    @property
    def side(self) -> int | None:
        """The side in pixels of a token's square; None if the sizes of pictures alone do not give their tokens."""
        return self.rule.side if isinstance(self.rule, Squares) else None

    def limits(self, most_tokens: int) -> ScaleLimits | None:
        """Return the limits of a run with `train.image_max_tokens` = most_tokens; None if no rule is known."""
        return self.rule.limits(most_tokens) if self.rule else None

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


def processor_of(folder: Path) -> Processor | None:
    """Return the picture processor of a model that transformers would read; None if the model sees no pictures.

    Raises VlmflowError if the file is not JSON, names a key twice, or has the rule of Qwen-VL and no limits.
    """
    name, key = NESTED
    whole = {}
    if (folder / name).is_file():
        text, members = _read(folder / name)
        whole = json.loads(text)
        if key in members and not text.startswith("null", members[key][0]):
            return _processor(folder / name, text, _members(folder / name, text, members[key][0]), whole)
    if (folder / PLAIN).is_file():
        return _processor(folder / PLAIN, *_read(folder / PLAIN), whole)
    return None


def own_limits(folder: Path, most_tokens: int) -> dict[str, Any]:
    """Return the keys with limits, and their values, of a model's processor that ms-swift limits only by its keys.

    most_tokens: the run's `train.image_max_tokens`. Empty for Qwen-VL, for processors without a known rule, and for
    models that see no pictures. Raises VlmflowError as `processor_of`.
    """
    processor = processor_of(folder)
    if processor is None or processor.side is not None:
        return {}
    limits = processor.limits(most_tokens)
    return limits.by_key() if limits else {}


Members = dict[str, tuple[int, int]]
"""Where the values of an object's keys begin and end in a text."""


def _read(file: Path) -> tuple[str, Members]:
    try:
        text = file.read_bytes().decode()
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: {error}", ADVICE) from None
    return text, _members(file, text, _blank(text, 0))


def _members(file: Path, text: str, start: int) -> Members:
    """Return the members of the object that begins at `start` of a valid JSON text."""
    if text[start] != "{":
        raise VlmflowError(
            f"{file}: an object must begin at character {start + 1}, not {text[start : start + 9]!r}", ADVICE
        )
    found: Members = {}
    for key, begin, end in _pairs(text, start):
        if key in found:
            raise VlmflowError(f"{file}: names the key {key!r} twice, so readers may take different values", ADVICE)
        found[key] = begin, end
    return found


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


def _processor(file: Path, text: str, members: Members, whole: dict[str, Any]) -> Processor:
    """Return the processor that a file describes. members: its members in the text. whole: the file of `NESTED`."""
    values: dict[str, Any] = {
        key: json.loads(text[slice(*members[key])])
        for key in ("image_processor_type", "patch_size", "merge_size", SIZE, LEAST, MOST, TILES)
        if key in members
    }
    kind = str(values.get("image_processor_type", QWEN)).removesuffix("Fast")  # transformers 5 does the same
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
