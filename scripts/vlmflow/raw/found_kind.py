"""Finds the kind of rows in the rows themselves: for `kind: auto`, and for a kind whose lists are rows of another."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from vlmflow.config.key_meanings import LABEL, PREFERENCE, folded
from vlmflow.config.raw_forms import RawForm, form_of, kinds, may_be_null, picture_keys
from vlmflow.config.row_settings import RowChoice, Take
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.named import raw_type
from vlmflow.raw.rewritten import rewriter
from vlmflow.raw.row_keys import OBJECT, spelled
from vlmflow.raw.split import RawRows

LOOKED_AT = 200
"""How many rows are looked at, from the first one on."""

FITS = 0.5
"""The share of these rows that a form must read to be a possible one: some rows may be broken."""

PICTURE = re.compile(r".{1,500}\.(?:jpe?g|png|gif|webp|bmp|tiff?|avif|jp2|p[bgpn]m|ico|tga)", re.IGNORECASE)
"""A text that names a picture."""


class Found(NamedTuple):
    """What a raw split is. kind: that of its rows. why: how it was found, for people; "" if the settings name it."""

    kind: str
    why: str = ""


class _Reading(NamedTuple):
    """How rows look in one kind.

    rows: how many of them it reads. needs: the keys that every row has. drops: the keys that would be lost although
    they have a meaning or name pictures, each with the advice for it.
    """

    kind: str
    rows: int
    needs: list[str]
    drops: dict[str, str]


def found_kind(kind: str, rows: RawRows, columns: Mapping[str, str], take: Take = None) -> Found:
    """Return the kind of the rows of a split. kind, columns, take: the settings of the data set.

    Raises VlmflowError if `kind` is none of rows, and more than one is possible, none is, or what rows mean would be
    lost in the only one.
    """
    form = form_of(kind)
    if form.read or form.rows:
        names = form.names(columns)
        if form.lists_are and any(_holds_list(row, next(iter(names.values()))) for row in islice(rows, LOOKED_AT)):
            return Found(form.lists_are)
        return Found(kind)
    first = list(islice(rows, LOOKED_AT))
    possible = _possible(first, columns, take)
    named = [one for one in possible if form_of(one.kind).one_prompt or form_of(one.kind).fixed]  # by people alone
    possible = [one for one in possible if one not in named]
    if len(possible) > 1:
        names_of = "; ".join(f"{one.kind} ({', '.join(one.needs)})" for one in possible)
        raise VlmflowError(
            f"{rows}: kind auto finds more than one kind that reads its rows: {names_of}",
            f"write the one that you mean: datasets.NAME.kind: {possible[0].kind}",
        )
    if not possible:
        keys = ", ".join(map(repr, _keys_of(first)[:20])) or "no key"
        chosen = [] if take else _possible(first, columns, "chosen")
        advice = f"kind: {chosen[0].kind} and take: chosen; or " if chosen else ""
        for one in named:
            needs = ["prompt: …"] if form_of(one.kind).one_prompt else []
            advice = f"{', '.join([f'kind: {one.kind}', *needs, *one.drops.values()])}; or "
        raise VlmflowError(
            f"{rows}: kind auto finds no kind for its rows; the first one has {keys}",
            f"write {advice}the kind in datasets.NAME.kind, and other names of its keys in columns (docs/data.md)",
        )
    only = possible[0]
    if only.drops:
        raise VlmflowError(
            f"{rows}: kind auto finds {only.kind}, which would lose what rows have under {', '.join(only.drops)}",
            f"write datasets.NAME.kind: {only.kind}, and " + "; ".join(dict.fromkeys(only.drops.values())),
        )
    why = f"{only.rows} of the first {len(first)} rows have {', '.join(only.needs)}, and no other kind reads them"
    return Found(only.kind, f"{only.kind}: {why}")


def settled(choice: RowChoice, rows: RawRows) -> RowChoice:
    """Return the choice of rows with the kind that these are found to be of. Raises VlmflowError like `found_kind`."""
    return (
        choice
        if choice.kind is None
        else of_kind(choice, found_kind(choice.kind, rows, choice.names, choice.take).kind)
    )


def of_kind(choice: RowChoice, kind: str) -> RowChoice:
    """Return the choice of rows that were found to be of a kind."""
    if choice.kind in (None, kind):
        return choice
    return choice.model_copy(update={"kind": kind, "names": form_of(kind).names(choice.names)})


def _holds_list(row: bytes, key: str) -> bool:
    try:
        return bytes(OBJECT(row).get(key, b""))[:1] == b"["
    except (ValueError, RecursionError):
        return False


def _possible(rows: Sequence[bytes], columns: Mapping[str, str], take: Take) -> list[_Reading]:
    """Return how some rows look in each form that fits them, under its first name."""
    forms = {kind: form_of(kind) for kind in kinds()}
    own = [kind for kind, form in forms.items() if kind == form.kinds[0] and (form.read or form.rows)]
    tried = [_tried(kind, rows, columns, take) for kind in own]
    return [one for one in tried if one.rows >= max(1, FITS * len(rows))]


def _tried(kind: str, rows: Sequence[bytes], columns: Mapping[str, str], take: Take) -> _Reading:
    form = form_of(kind)
    names = form.names(columns)
    decode, rewritten = msgspec.json.Decoder(raw_type(form.all_keys, names)).decode, rewriter(form, names, take)
    read, drops = 0, dict[str, str]()
    for raw in rows:
        row = rewritten(raw)
        try:
            found = decode(row)
            read += 1 if form.read is None else bool(getattr(form.read(found, None), "turns", None))
            drops |= _dropped(form, OBJECT(row), names, columns, take)
        except (ValueError, RecursionError):
            continue
    return _Reading(kind, read, [names[key] for key, holds in form.keys.items() if not may_be_null(holds)], drops)


def _dropped(
    form: RawForm, keys: Mapping[str, msgspec.Raw], names: Mapping[str, str], columns: Mapping[str, str], take: Take
) -> dict[str, str]:
    """Return the unread keys of a row that change what it means, or name pictures, each with the advice for it."""
    meanings = {folded(key): (key, meaning) for key, meaning in form.meanings_of_rows(columns).items()}
    dropped = {}
    pictures = spelled(keys, picture_keys(names))
    for key in [key for key in keys if key not in names.values() and key not in pictures]:
        value = _value(keys[key])
        known, meaning = meanings.get(folded(key), ("", None))
        if meaning and meaning.has(value):
            if not (take and meaning in (PREFERENCE, LABEL)):
                advice = {PREFERENCE: "take: chosen", LABEL: "take: true"}
                if known in form.chosen_by:
                    advice[meaning] = f"columns: {{{form.chosen_by[known]}: …}}, with the key to train on"
                dropped[key] = advice.get(meaning, f"ignore_keys: [{known}]")
        elif _names_picture(value):
            dropped[key] = f"columns: {{image: {key}}}"
    return dropped


def _names_picture(value: Any) -> bool:
    one = value[0] if isinstance(value, list) and value else value
    return isinstance(one, str) and PICTURE.fullmatch(one) is not None


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, OverflowError, RecursionError):
        return None


def _keys_of(rows: Sequence[bytes]) -> list[str]:
    """Return the keys of the first row that is an object."""
    for row in rows:
        try:
            return list(OBJECT(row))
        except (ValueError, RecursionError):
            continue
    return []
