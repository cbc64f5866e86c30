"""The keys of raw rows: those given twice, and those of pictures in another letter case.

Rows that write the same in another way, brought into their form: JSON in texts, two lists, chosen answers, frames.

Conversion, resolving and sampling rewrite a row by the same function before they decode it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw

from vlmflow.config.raw_forms import PICTURES, RawForm, holds_list, is_given, may_be_null
from vlmflow.config.settings import Take

OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Twice(Exception):
    """A key that is given twice."""


def key_fault(row: bytes, pictures: Collection[str] = ()) -> str:
    """Return what is wrong with the keys of a row, for people; "" if nothing is, or if it is not JSON.

    Decoders take the last value of a key that an object has twice. pictures: the keys of pictures, of which a row may
    have no two that differ only in letter case.
    """
    keys: list[str] = []

    def see(pairs: list[tuple[str, Any]]) -> None:
        nonlocal keys  # the row's own come last
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise _Twice(Counter(keys).most_common(1)[0][0])

    try:
        text = row.decode(errors="replace")
        json.loads(text, object_pairs_hook=see, parse_int=str, parse_float=str, parse_constant=str, strict=False)
    except _Twice as error:
        return f"the key {error.args[0][:100]!r} is given twice"
    except (ValueError, RecursionError):
        return ""
    alike: dict[str, str] = {}
    for key in spelled(keys, pictures):
        if (other := alike.setdefault(key.casefold(), key)) != key:
            return f"the keys {other!r} and {key!r} differ only in letter case"
    return ""


def spelled(keys: Iterable[str], pictures: Collection[str]) -> list[str]:
    """Return those of some keys that are keys of pictures, in any letter case."""
    folded = {key.casefold() for key in pictures}
    return [key for key in keys if key.casefold() in folded]


def with_own_keys(row: bytes, pictures: Collection[str]) -> bytes:
    """Return a row whose keys of pictures have the letter case of `pictures`; the same bytes if they have it already.

    row: an object without a `key_fault`; anything else is returned as it is.
    """
    try:
        held = OBJECT(row)
    except (ValueError, RecursionError):
        return row
    if set(spelled(held, pictures)) <= set(pictures):
        return row
    own = {key.casefold(): key for key in pictures}
    return msgspec.json.encode({own.get(key.casefold(), key): value for key, value in held.items()})


Row = dict[str, Raw]

VIDEOS = "videos"
VIDEO_TAG, IMAGE_TAG = "<video>", "<image>"
TAGS = re.compile(f"{VIDEO_TAG}|{IMAGE_TAG}")
FRAMES = msgspec.json.Decoder(list[list[str]]).decode
"""Each video as the files of its frames, as ms-swift takes them."""
NAMES = msgspec.json.Decoder(list[str] | str | None).decode
LIST = msgspec.json.Decoder(list[Raw]).decode
NULL = Raw(b"null")


def rewriter(
    form: RawForm, names: Mapping[str, str], take: Take = None, frames: int | None = None
) -> Callable[[bytes], bytes]:
    """Return the function that brings a row into its form; it returns the very same object if there is nothing to do.

    names: the keys that are read, with their names in the file; also those of `form.joins`, if they differ. take: the
    chosen answer becomes the last turn, or the form's answer. frames: how many frames of each video become pictures;
    None for none.
    """
    lists = {names[key]: may_be_null(holds) for key, holds in form.keys.items() if key in names and holds_list(holds)}
    turns = names[form.turns] if form.turns else ""
    joins = [names.get(key, key) for key in form.joins]
    answer = names[form.answer] if form.answer else ""

    def rewritten(row: bytes) -> bytes:
        try:
            keys = OBJECT(row)
            changed = _without_texts(keys, [*lists, *joins], lists)
            if take == "chosen":
                changed |= _with_chosen(keys, turns, joins, answer)
            changed |= _with_joined(keys, turns, joins)
            if frames:
                changed |= _with_frames(keys, turns, [names[key] for key in PICTURES if key in names], frames)
        except (ValueError, RecursionError):
            return row
        return msgspec.json.encode(keys) if changed else row

    return rewritten


def _without_texts(keys: Row, lists: Collection[str], nullable: Mapping[str, bool]) -> bool:
    """Replace texts that hold a JSON list by the list, and empty ones by null where that is allowed."""
    changed = False
    for key in lists:
        if key not in keys or bytes(keys[key])[:1] != b'"':
            continue
        text = msgspec.json.decode(keys[key], type=str)
        if text.lstrip().startswith("["):
            LIST(text.encode())
            keys[key] = Raw(text.encode())
            changed = True
        elif nullable.get(key) and not is_given(text):
            keys[key] = NULL
            changed = True
    return changed


def _with_chosen(keys: Row, turns: str, joins: list[str], answer: str) -> bool:
    """Put the chosen answer where the answer belongs; a row that has an answer there keeps both, and so stops."""
    if not _given(keys, "chosen"):
        return False
    if not turns:
        if _given(keys, answer):
            return False
        keys[answer] = keys.pop("chosen")
        return True
    chosen = _listed(keys.pop("chosen"))
    before = next((key for key in (turns, *joins[:1]) if _is_list(keys.get(key))), None)
    prompt = LIST(keys.pop(before)) if before else []
    same = [bytes(turn) for turn in chosen[: len(prompt)]] == [bytes(turn) for turn in prompt]
    keys[turns] = Raw(msgspec.json.encode(chosen if same else prompt + chosen))
    return True


def _with_joined(keys: Row, turns: str, joins: list[str]) -> bool:
    """Join the lists that are the turns of a row without them."""
    if not joins or turns in keys or not all(_is_list(keys.get(key)) for key in joins):
        return False
    keys[turns] = Raw(msgspec.json.encode([turn for key in joins for turn in LIST(keys.pop(key))]))
    return True


def _with_frames(keys: Row, turns: str, pictures: list[str], most: int) -> bool:
    """Put frames of the row's videos among its pictures: `most` of each at most, evenly drawn.

    A row stays, and so stops, if its videos are no lists of files, or are not as many as their tags. pictures: the keys
    of pictures, the last of which gets all.
    """
    if VIDEOS not in keys:
        return False
    try:
        videos = FRAMES(keys[VIDEOS])
        held = [NAMES(keys[key]) or [] for key in pictures if key in keys]
    except msgspec.ValidationError:
        return False
    shown: list[str] = []
    for names in held:
        named = [names] if isinstance(names, str) else names
        shown = named if set(shown).issubset(named) else shown + named  # as `named.pictures_of`
    drawn = [_evenly(video, most) for video in videos]
    text = bytes(keys.get(turns, b"")).decode()
    tags = TAGS.findall(text)
    if tags and (tags.count(IMAGE_TAG), tags.count(VIDEO_TAG)) != (len(shown), len(drawn)):
        return False
    if tags:
        of_image, of_video, placed = iter(shown), iter(drawn), []
        for tag in tags:
            placed.append([next(of_image)] if tag == IMAGE_TAG else next(of_video))
        tagged = iter(placed)
        keys[turns] = Raw(TAGS.sub(lambda tag: IMAGE_TAG * len(next(tagged)), text).encode())
        shown, drawn = [], placed
    for key in (VIDEOS, *pictures):
        keys.pop(key, None)
    keys[pictures[-1]] = Raw(msgspec.json.encode([*shown, *chain.from_iterable(drawn)]))
    return True


def _evenly(frames: list[str], most: int) -> list[str]:
    """Return at most so many frames, evenly drawn, the first and the last among them."""
    if len(frames) <= most:
        return frames
    return [frames[round(index * (len(frames) - 1) / max(most - 1, 1))] for index in range(most)]


def _given(keys: Row, key: str) -> bool:
    return key in keys and is_given(msgspec.json.decode(keys[key]))


def _is_list(value: Raw | None) -> bool:
    return value is not None and bytes(value)[:1] == b"["


def _listed(value: Raw) -> list[Raw]:
    return LIST(value) if _is_list(value) else [value]
