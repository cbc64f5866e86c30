"""The picture limits of a run in a model's own files, so that all who read them scale pictures as the training did.

ms-swift takes its limits from the environment (`swift/child_process`); transformers, vLLM and SGLang take them from the
processor's file, whose `size` is an area in pixels although its keys say edge. This module alone knows that file.

Processors that cut pictures into squares of one token (Qwen-VL) can be limited so. Others scale pictures by a rule of
their own, in training and everywhere else, and stay as they are.
"""

import json
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

SIZE, LEAST, MOST = "size", "min_pixels", "max_pixels"
"""The keys that hold the limits; the last two, of older files, override the first (transformers 5,
image_processing_qwen2_vl.py)."""

ADVICE = "take the model with the files that its owner published"

Pixels = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class ScaleLimits(msgspec.Struct, frozen=True):
    """The smallest and the largest picture in pixels (width × height); others are scaled to them."""

    shortest_edge: int
    longest_edge: int


class _Rule(msgspec.Struct, frozen=True):
    """The used fields of a picture processor: pixels of a patch's side, and patches along a token's square."""

    patch_size: Pixels
    merge_size: Pixels


class Processor(msgspec.Struct, frozen=True):
    """The picture processor of a model.

    file: the name of the file that describes it. text: the file's content. places: where the values of the keys with
    limits begin and end in the text. side: of a token's square in pixels; None if it does not cut pictures into such.
    """

    file: str
    text: str
    places: dict[str, tuple[int, int]] = {}
    side: int | None = None

    def limits(self, most_tokens: int) -> ScaleLimits | None:
        """Return the limits of a run with `train.image_max_tokens` = most_tokens; None if they do not apply."""
        if self.side is None:
            return None
        return ScaleLimits(FEWEST_TOKENS * self.side**2, most_tokens * self.side**2)

    def limited(self, limits: ScaleLimits) -> bytes:
        """Return the file's content with these limits; all other values stay the same, byte for byte."""
        values = {SIZE: msgspec.to_builtins(limits), LEAST: limits.shortest_edge, MOST: limits.longest_edge}
        text = self.text
        for key, (start, end) in sorted(self.places.items(), key=lambda item: -item[1][0]):
            text = text[:start] + json.dumps(values[key]) + text[end:]
        return text.encode()


def processor_of(folder: Path) -> Processor | None:
    """Return the picture processor of a model that transformers would read; None if the model sees no pictures.

    Raises VlmflowError if the file is not JSON, names a key twice, or has the rule of Qwen-VL and no limits.
    """
    name, key = NESTED
    if (folder / name).is_file():
        text, members = _read(folder / name)
        if key in members and not text.startswith("null", members[key][0]):
            return _processor(folder / name, text, _members(folder / name, text, members[key][0]))
    if (folder / PLAIN).is_file():
        return _processor(folder / PLAIN, *_read(folder / PLAIN))
    return None


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


def _processor(file: Path, text: str, members: Members) -> Processor:
    values: dict[str, Any] = {
        key: json.loads(text[slice(*members[key])])
        for key in ("patch_size", "merge_size", SIZE, LEAST, MOST)
        if key in members
    }
    if "patch_size" not in values or "merge_size" not in values:
        return Processor(file.name, text)
    try:
        rule = msgspec.convert(values, _Rule)
    except msgspec.ValidationError as error:
        raise VlmflowError(f"{file}: {error}; they give the pixels of a picture token", ADVICE) from None
    places = {key: members[key] for key in (SIZE, LEAST, MOST) if values.get(key) is not None}
    if SIZE not in places and not {LEAST, MOST} <= places.keys():
        raise VlmflowError(f"{file}: has no {SIZE}, or {LEAST} and {MOST}, which hold the picture limits", ADVICE)
    return Processor(file.name, text, places, rule.patch_size * rule.merge_size)
