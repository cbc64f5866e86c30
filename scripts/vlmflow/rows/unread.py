"""What the conversion does not read: keys, and last turns without an answer.

It is counted, and stops the conversion if a key changes what the row means (see `config.key_meanings`).

Counting costs next to nothing while rows have the same keys: these are learned from the first row, and a decoder
that accepts no others confirms that a row has just them. Only a row with other keys is checked key by key.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vlmflow.config.key_meanings import Meaning
from vlmflow.config.row_settings import NOT_IN_COLUMNS
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import shown

SHAPES_KEPT = 32
"""Sets of keys that a process has decoders for; rows with other sets are checked key by key."""

NAMES_KEPT = 1_000
"""Names of keys that are counted separately: hostile rows may have millions."""

NAME_KEPT = 100
"""Characters of a key's name, and of the value that is shown with it."""

Keys = dict[str, msgspec.Raw]
"""The keys of an object, each with its value as JSON."""

OF_ROW = msgspec.json.Decoder(Keys).decode
OF_NESTED = msgspec.json.Decoder(Keys | list[Keys]).decode

Names = tuple[str, ...]
KeySet = tuple[Names, tuple[Names, ...]]
"""The unread keys of a row, and those of each key that holds objects, which are the same in all of these."""


class UnreadKeys(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was not read in the rows of a raw split, in `unread.json` and `stats.json`; all counts are of rows."""

    unread_keys: dict[str, int]
    """By key, a turn's as `messages.weight`."""

    further_unread_keys: int = 0
    """Beyond NAMES_KEPT keys: each counted on its own, all together. Left out where there are none."""

    ignored_keys: dict[str, int]
    """By key of `ignore_keys`: where it would change what the row means."""

    unanswered_last_turns: int
    """Those that ended with a turn that nobody answers, which was dropped."""


@dataclass
class Found:
    """What was found in some rows.

    keys: how many rows have an unread key, a turn's as `messages.weight`. other_keys: the same for all beyond
    NAMES_KEPT, together. meant: in how many rows a key has its meaning; first: the first of these with the value.
    rows: how many there are. last_turns: how many of them ended with a turn that nobody answers, which was dropped.
    """

    keys: Counter[str] = field(default_factory=Counter)
    other_keys: int = 0
    meant: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)
    rows: int = 0
    last_turns: int = 0

    def add(self, other: "Found") -> None:
        """Add what was found in the rows after these."""
        for key, count in sorted(other.keys.items()):
            if key in self.keys or len(self.keys) < NAMES_KEPT:
                self.keys[key] += count
            else:
                self.other_keys += count
        self.other_keys += other.other_keys
        self.meant += other.meant
        self.first = other.first | self.first
        self.rows += other.rows
        self.last_turns += other.last_turns

    def refuse(self, where: str, dataset: str, meanings: Mapping[str, Meaning], ignored: Collection[str]) -> None:
        """Raise VlmflowError where keys have a meaning that is not ignored; it names all of them."""
        if not (stopping := sorted(self.meant.keys() - set(ignored))):
            return
        lines = []
        for key in stopping:
            number, value = self.first[key]
            place = f"first in row {number} (counted from 0), with {value}"
            lines.append(f"  {key}: {self.meant[key]} of {self.rows} rows, {place}: {meanings[key].says}")
        raise VlmflowError(
            "\n".join([f"{where}: the workflow does not read these keys, which change what rows mean:", *lines]),
            "remove such rows, or write the keys' content into the turns; to train on them as if these keys were "
            f"absent, add this line to datasets.{dataset}: ignore_keys: [{', '.join([*ignored, *stopping])}]",
        )

    def counts(self, ignored: Collection[str]) -> UnreadKeys:
        """Give what the accounts say of it; ignored: the keys that do not stop the conversion."""
        return UnreadKeys(
            unread_keys=dict(sorted(self.keys.items())),
            further_unread_keys=self.other_keys,
            ignored_keys={key: self.meant[key] for key in sorted(ignored) if self.meant[key]},
            unanswered_last_turns=self.last_turns,
        )


@dataclass(slots=True)
class Shape:
    """Rows with one set of unread keys: what decodes them, and refuses all others; names: those keys, each once."""

    decode: Any
    names: Names
    rows: int = 0


class Unread:
    """Counts what is not read in the rows of one raw split; each process has its own.

    types: what rows are decoded into, that for rows without unread keys in their nested objects first; their keys are
    those that are read.
    nested: by key, as in the file, the type of the objects that it holds (one, or a list).
    meanings: see `RawForm.meanings_of`. ignored: those of them that do not stop the conversion.
    assistants: who of those that speak in the nested objects, by their first field, gives answers.
    """

    def __init__(
        self,
        types: tuple[type[msgspec.Struct], type[msgspec.Struct]],
        nested: Mapping[str, type[msgspec.Struct]],
        meanings: Mapping[str, Meaning] | None = None,
        ignored: Collection[str] = (),
        assistants: Collection[str] = (),
    ) -> None:
        self.meanings, self.ignored = meanings or {}, ignored
        self._assistants = frozenset(assistants)
        self._names = {_folded(key): key for key in self.meanings}
        self._types, self._nested = types, nested
        self._fields = {one.encode_name: one for one in msgspec.structs.fields(types[1])}
        self._nested_keys = {key: _names(held) for key, held in nested.items()}
        self._shapes: dict[KeySet, Shape] = {}
        self._found = Found()
        self.shape = self._shapes.setdefault(((), tuple(() for _ in nested)), self._made((), [()] * len(nested)))

    def last_turn(self) -> None:
        """Count a row whose unanswered last turn is dropped."""
        self._found.last_turns += 1

    def count(self, number: int, row: bytes) -> None:
        """Count the keys of a sound row, number `number` of the split, that is not of the current shape."""
        self._found.rows += 1
        try:
            keys, nested = self._keys_of(row)
        except ValueError:  # a key that is not UTF-8 (files of cp1252), which the readers of the row skip
            keys, nested = self._keys_of(row.decode(errors="replace").encode())
        top = tuple(sorted(keys.keys() - self._fields.keys()))
        paths = set(top)
        inner: list[set[Names]] = []
        for holder, read in self._nested_keys.items():
            inner.append({tuple(sorted(one.keys() - read)) for one in nested[holder]})
            paths.update(f"{holder}.{key}" for names in inner[-1] for key in names)
            if any(inner[-1]):
                self._weigh_turns(holder, number, nested[holder])
        done: set[str] = set()
        for key in top:
            path = self._known(key)
            if path and path not in done and self._weigh(path, number, keys[key]):
                done.add(path)
        self._found.keys.update({path[:NAME_KEPT] for path in paths})
        if all(len(sets) == 1 for sets in inner):
            self._learn((top, tuple(next(iter(sets)) for sets in inner)), paths)

    def take(self, columns: Collection[str] = (), first: int = 0) -> Found:
        """Give what was found since the last call, in rows from number `first` on.

        columns: those of a table that were not read at all; every row has them. What bytes mean is not known: a key
        that may have a meaning has it there.
        """
        found, self._found = self._found, Found()
        for shape in self._shapes.values():
            if shape.rows:
                found.rows += shape.rows
                found.keys.update(dict.fromkeys(shape.names, shape.rows))
                shape.rows = 0
        for column in columns if found.rows else ():
            found.keys[column[:NAME_KEPT]] += found.rows
            if column in self.meanings:
                found.meant[column] += found.rows
                found.first[column] = (first, "bytes")
        return found

    def _known(self, key: str) -> str:
        """Give the name of the meaningful key that this one is, whatever its case; "" if it is none."""
        return self._names.get(_folded(key), "") if len(key) <= NAME_KEPT else ""

    def _weigh(self, key: str, number: int, value: msgspec.Raw, answers: bool = False) -> bool:
        """Count a key where its value has the key's meaning; say whether it has. answers: an assistant's turn."""
        meaning = self.meanings[key]
        if (meaning.of_answers and not answers) or not _has(meaning, value):
            return False
        self._found.meant[key] += 1
        self._found.first.setdefault(key, (number, shown(bytes(value)[:NAME_KEPT].decode(errors="replace"))))
        return True

    def _keys_of(self, row: bytes) -> tuple[Keys, dict[str, list[Keys]]]:
        """Give the keys of a row with their values, and likewise those of each of its nested objects."""
        keys = OF_ROW(row)
        nested = {holder: OF_NESTED(keys[holder]) for holder in self._nested}
        return keys, {holder: found if isinstance(found, list) else [found] for holder, found in nested.items()}

    def _weigh_turns(self, holder: str, number: int, turns: list[Keys]) -> None:
        spoken_by = msgspec.structs.fields(self._nested[holder])[0].encode_name
        done: set[str] = set()
        for turn in turns:
            answers = msgspec.json.decode(turn[spoken_by]) in self._assistants
            for key, value in turn.items():
                path = self._known(f"{holder}.{key}")
                if path and path not in done and self._weigh(path, number, value, answers):
                    done.add(path)

    def _learn(self, keys: KeySet, paths: set[str]) -> None:
        """Try this set of keys first from now on; keys that may have a meaning are looked at in every row."""
        if keys not in self._shapes:
            odd = any(self._known(path) or len(path) > NAME_KEPT or NOT_IN_COLUMNS.search(path) for path in paths)
            if odd or len(paths) > NAMES_KEPT or len(self._shapes) == SHAPES_KEPT:
                return
            self._shapes[keys] = self._made(*keys)
        self.shape = self._shapes[keys]

    def _made(self, top: Names, inner: Collection[Names]) -> Shape:
        names = [*top, *(f"{holder}.{key}" for holder, keys in zip(self._nested, inner, strict=True) for key in keys)]
        plain, general = self._types
        if not any(inner) and plain is not general:
            made = _strict(plain, top, [])
        else:
            changed = []
            for (key, held), unread in zip(self._nested.items(), inner, strict=True):
                field, kind = self._fields[key], _strict(held, unread, [])
                holds = list[kind] if field.type != held else kind  # type: ignore[valid-type]  # made here
                changed.append((field.name, holds, msgspec.field(name=key)))
            made = _strict(general, top, changed)
        return Shape(msgspec.json.Decoder(made).decode, tuple(names))


def _folded(key: str) -> str:
    """Give a key as it reads: `systemPrompt` and `System_prompt` are `system_prompt`."""
    return key.replace("_", "").lower()


def _has(meaning: Meaning, value: msgspec.Raw) -> bool:
    try:
        return meaning.has(_value(value))
    except RecursionError:  # lists within lists hold something
        return True


def _value(raw: msgspec.Raw) -> Any:
    """Give a value; its bytes as a text where it holds what Python cannot."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, OverflowError, RecursionError):
        return bytes(raw).decode(errors="replace")


def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(one.encode_name for one in msgspec.structs.fields(kind))


def _strict(kind: type[msgspec.Struct], unread: Names, changed: list[Any]) -> type[msgspec.Struct]:
    """Give the type of rows that have just these unread keys, besides what `kind` reads."""
    keys = [(f"unread{number}", msgspec.Raw, msgspec.field(name=key)) for number, key in enumerate(unread)]
    return msgspec.defstruct(
        kind.__name__, [*changed, *keys], bases=(kind,), kw_only=True, forbid_unknown_fields=True, gc=False
    )
