"""The keys of raw rows: those given twice, and those of pictures in another letter case."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

MARKS = re.compile(rb':(?<=[" \t\r\n]:)').findall
"""The colons of a row behind a quotation mark or white space: those of all its keys, and some in its texts."""

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


def count_keys(value: bytes) -> int:
    """Return how many keys the objects in a JSON value have, all together; -1 if Python cannot decode it."""
    found = 0

    def see(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found += len(pairs)

    try:
        json.loads(value.decode(errors="replace"), object_pairs_hook=see, parse_int=str, parse_float=str, strict=False)
    except (ValueError, RecursionError):
        return -1
    return found


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
