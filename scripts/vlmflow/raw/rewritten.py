"""Rows that write the same in another way, brought into their form: turns as JSON in a text, in two lists, or chosen.

Conversion, resolving and sampling rewrite a row by the same function before they decode it.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec import Raw

from vlmflow.config.key_meanings import is_given
from vlmflow.config.raw_forms import RawForm, holds_list, may_be_null
from vlmflow.config.row_settings import Take
from vlmflow.raw.row_keys import OBJECT

Row = dict[str, Raw]

LIST = msgspec.json.Decoder(list[Raw]).decode
NULL = Raw(b"null")


def rewriter(form: RawForm, names: Mapping[str, str], take: Take = None) -> Callable[[bytes], bytes]:
    """Return the function that brings a row into its form; it returns the very same object if there is nothing to do.

    names: the keys that are read, with their names in the file; also those of `form.joins`, if they differ. take: the
    chosen answer becomes the last turn, or the form's answer.
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
    asked = LIST(keys.pop(before)) if before else []
    same = [bytes(one) for one in chosen[: len(asked)]] == [bytes(one) for one in asked]
    keys[turns] = Raw(msgspec.json.encode(chosen if same else asked + chosen))
    return True


def _with_joined(keys: Row, turns: str, joins: list[str]) -> bool:
    """Join the lists that are the turns of a row without them."""
    if not joins or turns in keys or not all(_is_list(keys.get(key)) for key in joins):
        return False
    keys[turns] = Raw(msgspec.json.encode([one for key in joins for one in LIST(keys.pop(key))]))
    return True


def _given(keys: Row, key: str) -> bool:
    return key in keys and is_given(msgspec.json.decode(keys[key]))


def _is_list(value: Raw | None) -> bool:
    return value is not None and bytes(value)[:1] == b"["


def _listed(value: Raw) -> list[Raw]:
    return LIST(value) if _is_list(value) else [value]
