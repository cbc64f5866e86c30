"""Finds the kind of rows in the rows themselves: for `kind: auto`, and for a kind whose lists are rows of another."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vlmflow.config.raw_forms import (
    LABEL,
    MEDIA,
    PREFERENCE,
    SYSTEM,
    RawForm,
    folded,
    form_of,
    is_given,
    kinds,
    may_be_null,
    picture_keys,
)
from vlmflow.config.settings import RowChoice, Take
from vlmflow.core.errors import VlmflowError, printable
from vlmflow.raw.damaged_file import ANOTHER_FILE
from vlmflow.raw.named import is_picture, raw_type, reader
from vlmflow.raw.rewritten import OBJECT, rewriter, spelled
from vlmflow.raw.split import RawRows
from vlmflow.raw.table_file import BYTES, LOOKED_AT

FITS = 0.5
"""The share of these rows that a form must read to be a possible one: some rows may be broken."""

PICTURE = re.compile(r".{1,500}\.(?:jpe?g|png|gif|webp|bmp|tiff?|avif|jp2|p[bgpn]m|ico|tga)(?:[?#].*)?", re.IGNORECASE)
"""A text that names a picture."""

ADDRESS = re.compile(r"\s*https?://", re.IGNORECASE).match

BESIDE_QUESTIONS = ("context", "passage", "document", "evidence", "choices", "options", "hint")
"""Keys of what a question is asked about, or chooses from; who drops them says so."""

ANSWERS = ("output", "outputs", "response", "completion", "answer", "target")
"""Keys of the answer beside turns under another key (Responses API, LangSmith, Nemotron): the last answer of these
would be trained instead."""

RENAMED = {"messages": "messages", "sharegpt": "conversations"}
"""Kinds whose turns often stand under another key than this."""


class Found(NamedTuple):
    """What a raw split is. kind: that of its rows. why: how it was found, for people; "" if the settings name it."""

    kind: str
    why: str = ""


class _Reading(NamedTuple):
    """How rows look in one kind.

    rows: how many of them it reads. needs: the keys that every row has. drops: the keys that would be lost although
    they have a meaning or name pictures, each with the advice for it. fault: why the first row that it does not read,
    with the row's number.
    """

    kind: str
    rows: int
    needs: list[str]
    drops: dict[str, str]
    fault: str


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
    readings = _readings(first, columns, take)
    possible = [reading for reading in readings if _fits(reading, first)]
    # Only people can name these kinds.
    named = [reading for reading in possible if form_of(reading.kind).one_prompt or form_of(reading.kind).fixed]
    possible = [reading for reading in possible if reading not in named]
    if len(possible) > 1:
        names_of = "; ".join(f"{reading.kind} ({', '.join(reading.needs)})" for reading in possible)
        raise VlmflowError(
            f"{rows}: kind auto finds more than one kind that reads its rows: {names_of}",
            f"write the one that you mean: datasets.NAME.kind: {possible[0].kind}",
        )
    if not possible:
        keys = _keys_of(first)
        if keys is None:
            raise VlmflowError(f"{rows}: kind auto finds no kind, since no row is a JSON object", ANOTHER_FILE)
        has = ", ".join(map(repr, keys[:20])) or "no key"
        with_chosen = [] if take else _readings(first, columns, "chosen")
        chosen = [reading for reading in with_chosen if _fits(reading, first)]
        near = [f"as {each.kind}, {each.fault}" for each in readings if set(each.needs) <= set(keys) and each.needs]
        advice = f"kind: {chosen[0].kind} and take: chosen; or " if chosen else _of_other_names(keys, first)
        for reading in named:
            needs = ["prompt: …"] if form_of(reading.kind).one_prompt else []
            advice = f"{', '.join([f'kind: {reading.kind}', *needs, *reading.drops.values()])}; or "
        raise VlmflowError(
            f"{rows}: kind auto finds no kind for its rows; the first one has {has}"
            + "".join(f"; {fault}" for fault in near[:2]),
            f"write {advice}the kind in datasets.NAME.kind, and other names of its keys in columns (docs/data.md)",
        )
    only = possible[0]
    if only.drops:
        raise VlmflowError(
            f"{rows}: kind auto finds {only.kind}, which would lose what rows have under {', '.join(only.drops)}",
            f"write datasets.NAME.kind: {only.kind}, and " + "; ".join(dict.fromkeys(only.drops.values())),
        )
    as_it_is = set(only.needs) <= set(_keys_of(first) or ())
    reads = f"have {', '.join(only.needs)}" if as_it_is else f"can be written as {only.kind}"
    why = f"{only.rows} of the first {len(first)} rows {reads}, and no other kind reads them"
    return Found(only.kind, f"{only.kind}: {why}")


def settled(choice: RowChoice, rows: RawRows) -> RowChoice:
    """Return the choice of rows with the kind that these are found to be of. Raises VlmflowError like `found_kind`."""
    if choice.kind is None:
        return choice
    return of_kind(choice, found_kind(choice.kind, rows, choice.names, choice.take).kind)


def of_kind(choice: RowChoice, kind: str) -> RowChoice:
    """Return the choice of rows that were found to be of a kind."""
    if choice.kind in (None, kind):
        return choice
    return choice.model_copy(update={"kind": kind, "names": form_of(kind).names(choice.names)})


def unread_pictures(rows: RawRows, kind: str, columns: Mapping[str, str], choice: RowChoice) -> dict[str, str]:
    """Return the keys and columns with pictures, or their names, that rows without a picture have, with the advice.

    The first LOOKED_AT rows are looked at. kind: the one that they were found to be of. columns: the setting.
    """
    if form_of(kind).fixed:
        return {}
    read, own, advice = reader(choice), form_of(kind).names(columns).values(), dict[str, str]()
    for row in islice(rows, LOOKED_AT):
        named = read(row)
        if named and not named.pictures:
            values = {key: _value(raw) for key, raw in OBJECT(row).items() if key not in own}
            advice |= {key: _as_pictures(key, value) for key, value in values.items() if _names_picture(value)}
    for file in rows.files:
        holds = file.columns or {}
        advice |= {name: _as_pictures(name, "") for name in file.unread_columns if BYTES in holds[name].split()}
    return advice


def _as_pictures(key: str, value: Any) -> str:
    """Return how an unread key with pictures becomes a read one."""
    named = isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    if named and all(map(ADDRESS, [value] if isinstance(value, str) else value)):
        return f"columns: {{image: {key}}}, once you have downloaded the pictures and written their paths there"
    return f"columns: {{image: {key}}}" if named else f"the pictures of {key} under a key image or images"


def _holds_list(row: bytes, key: str) -> bool:
    try:
        return bytes(OBJECT(row).get(key, b""))[:1] == b"["
    except (ValueError, RecursionError):
        return False


def _readings(rows: Sequence[bytes], columns: Mapping[str, str], take: Take) -> list[_Reading]:
    """Return how some rows look in each form, under its first name."""
    forms = {kind: form_of(kind) for kind in kinds()}
    own = [kind for kind, form in forms.items() if kind == form.kinds[0] and (form.read or form.rows)]
    return [_tried(kind, rows, columns, take) for kind in own]


def _fits(reading: _Reading, rows: Sequence[bytes]) -> bool:
    return reading.rows >= max(1, FITS * len(rows))


def _tried(kind: str, rows: Sequence[bytes], columns: Mapping[str, str], take: Take) -> _Reading:
    form = form_of(kind)
    names = form.names(columns)
    decode, rewritten = msgspec.json.Decoder(raw_type(form.all_keys, names)).decode, rewriter(form, names, take)
    read, drops, fault = 0, dict[str, str](), ""
    for number, raw in enumerate(rows):
        row = rewritten(raw)
        try:
            value = decode(row)
            made = None if form.read is None else form.read(value, None)
            if form.read is None or getattr(made, "turns", None):
                read += 1
            else:
                fault = fault or f"row {number}: {getattr(made, 'detail', 'no turn')}"
            pictured = bool(getattr(made, "pictures", ()))
            drops |= _dropped(form, OBJECT(row), names, columns, take, pictured)
        except (ValueError, RecursionError) as error:
            fault = fault or f"row {number}: {printable(str(error)[:200])}"
    needs = [names[key] for key, holds in form.keys.items() if not may_be_null(holds)]
    return _Reading(kind, read, needs, drops, fault)


def _dropped(
    form: RawForm,
    keys: Mapping[str, msgspec.Raw],
    names: Mapping[str, str],
    columns: Mapping[str, str],
    take: Take,
    pictured: bool,
) -> dict[str, str]:
    """Return the unread keys of a row that change what it means, or name pictures, each with the advice for it.

    pictured: whether the turns name pictures. Beside some that are read, an address says where they came from.
    """
    meanings = {folded(key): (key, meaning) for key, meaning in form.meanings_of_rows(columns).items()}
    dropped = {}
    pictures = spelled(keys, picture_keys(names))
    read = [item for key in pictures for item in _texts(_value(keys[key]))]
    for key in [key for key in keys if key not in names.values() and key not in pictures]:
        value = _value(keys[key])
        known, meaning = meanings.get(folded(key), ("", None))
        if meaning and meaning.has(value):
            if not (take and meaning in (PREFERENCE, LABEL)):
                advice = {PREFERENCE: "take: chosen", LABEL: "take: true"}
                if known in form.chosen_by:
                    advice[meaning] = f"columns: {{{form.chosen_by[known]}: …}}, with the key to train on"
                if meaning is SYSTEM and "system" in names:
                    advice[meaning] = f"columns: {{system: {key}}}"
                if meaning is MEDIA:
                    frames = "frames_as_pictures: 8" if _names_picture(value) else "a file without these rows"
                    advice[meaning] = f"{frames}; or, if their texts do without, ignore_keys: [{known}]"
                dropped[key] = advice.get(meaning, f"ignore_keys: [{known}]")
        elif _names_picture(value):
            if not pictured and not read:
                dropped[key] = _as_pictures(key, value)
            elif not _repeats(value, read):
                dropped[key] = f"the pictures of {key} in one list with the others; or ignore_keys: [{key}]"
        elif not form.turns and folded(key) in BESIDE_QUESTIONS and is_given(value):
            dropped[key] = f"columns: {{input: {key}}}" if "input" in names else f"rows whose question holds {key}"
    return dropped


def _texts(value: Any) -> list[str]:
    """Return the texts in a value: one, those of a list, or of an object."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [item for item in held if isinstance(item, str) and item]


def _repeats(value: Any, read: Sequence[str]) -> bool:
    """Return whether texts are only addresses, or paths of the same files as pictures that are read."""
    files, texts = {Path(path).name for path in read}, _texts(value)
    return bool(texts) and all(ADDRESS(text) or Path(text).name in files for text in texts)


def _names_picture(value: Any, depth: int = 3) -> bool:
    """Return whether a value is a picture or the name of one, or holds one; of a list, the first item counts."""
    if isinstance(value, list | dict):
        held = value[:1] if isinstance(value, list) else value.values()
        return depth > 0 and any(_names_picture(item, depth - 1) for item in held)
    return isinstance(value, str) and (PICTURE.fullmatch(value) is not None or is_picture(value))


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, OverflowError, RecursionError):
        return None


def _of_other_names(keys: Sequence[str], rows: Sequence[bytes]) -> str:
    """Return the advice for turns under another key than that of their kind; "" if there are none."""
    for kind, name in RENAMED.items():
        for key in keys:
            if key not in form_of(kind).all_keys and _fits(_tried(kind, rows, {name: key}, None), rows):
                if answer := next((other for other in keys if folded(other) in ANSWERS and other != key), None):
                    return f"each row's {answer} into the file as the last turn of its {key}, which is its history; or "
                return f"kind: {kind}, columns: {{{name}: {key}}}; or "
    return ""


def _keys_of(rows: Sequence[bytes]) -> list[str] | None:
    """Return the keys of the first row that is an object; None if no row is."""
    for row in rows:
        try:
            return list(OBJECT(row))
        except (ValueError, RecursionError):
            continue
    return None
