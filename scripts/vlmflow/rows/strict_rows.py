"""Decoders of rows that have just one set of keys: they refuse every other row, and a key that is given twice.

What a conversion did not read, and changed, counted: the part of its account that is the same for all forms.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args, get_origin

import msgspec
from msgspec import UNSET

from vlmflow.config.raw_forms import Meaning
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.rewritten import MARKS, key_fault

CONTAINERS = (dict, list)

Names = tuple[str, ...]
"""Unread keys."""


def strict_type(kind: type[msgspec.Struct], unread: Names, changed: list[Any]) -> type[msgspec.Struct]:
    """Return the type of objects that have just the keys of `kind` and these unread keys.

    changed: fields that replace those of `kind`.
    """
    keys = [(f"unread{number}", msgspec.Raw, msgspec.field(name=key)) for number, key in enumerate(unread)]
    return msgspec.defstruct(
        kind.__name__, [*changed, *keys], bases=(kind,), kw_only=True, forbid_unknown_fields=True, gc=False
    )


def row_decoder(
    kind: type[msgspec.Struct], objects: Mapping[str, int], otherwise: Callable[[bytes], Any] | None = None
) -> Callable[[bytes], Any]:
    """Return the function that decodes a row of this type, and refuses it (ValidationError) if a key is given twice.

    The search for such a key takes as long as the whole conversion of a row. It is needed only if `MARKS` finds another
    number than that of the row's keys.

    kind: a type without optional keys in the types of its objects, but for those in lists. objects: by unread key with
    an object or a list, how many keys are there in all. otherwise: decodes the rows that are not of this type.
    """
    fields = {one.encode_name: one for one in msgspec.structs.fields(kind)}
    optional = [one.name for one in fields.values() if one.default is UNSET]
    values = attrgetter(*(optional if len(optional) > 1 else [one.name for one in fields.values()]))
    lists: list[tuple[Callable[[Any], Any], int, list[str]]] = []
    inner: list[tuple[Callable[[Any], Any], Callable[[Any], Any], int]] = []
    anything: list[Callable[[Any], Any]] = []
    given: list[Callable[[Any], Any]] = []
    unread = [(attrgetter(fields[key].name), marks) for key, marks in objects.items()]
    most, strict = len(fields) + sum(objects.values()), msgspec.json.Decoder(kind).decode
    for one in fields.values():
        holds = get_args(one.type)[0] if get_origin(one.type) is list else one.type
        if holds is Any or get_origin(holds) is dict:
            (given if one.default is UNSET else anything).append(attrgetter(one.name))
        elif isinstance(holds, type) and issubclass(holds, msgspec.Struct):
            keys = msgspec.structs.fields(holds)
            if holds is one.type:
                most += len(keys)
            else:
                may_lack = [key.name for key in keys if key.default is UNSET]
                lists.append((attrgetter(one.name), len(keys), may_lack))
                inner += [(attrgetter(one.name), attrgetter(name), parts) for name, parts in _parts_in(holds)]

    loose = [*anything, *given]

    def decode(row: bytes) -> Any:
        try:
            raw = strict(row)
        except msgspec.ValidationError:
            if otherwise is None:
                raise
            return otherwise(row)
        absent = values(raw).count(UNSET)
        marks = most - absent
        for held, keys, may_lack in lists:
            marks += keys * len(held(raw))
            for name in may_lack:
                marks -= [getattr(one, name) for one in held(raw)].count(UNSET)
        for held, parts, number in inner:
            marks += number * sum(len(one) for one in map(parts, held(raw)) if type(one) is list)
        for held in anything if absent == len(optional) else loose:
            if type(value := held(raw)) in CONTAINERS:
                marks += _keys_in(value)
        for held, inside in unread:
            if len(MARKS(bytes(held(raw)))) != inside:
                marks = -1
        if len(MARKS(row)) != marks and key_fault(row):
            raise msgspec.ValidationError
        return raw

    return decode


def _parts_in(kind: type[msgspec.Struct]) -> Iterator[tuple[str, int]]:
    """Yield the fields of a type that may hold lists of objects, with the number of keys that each object has."""
    for key in msgspec.structs.fields(kind):
        for holds in get_args(key.type):
            if get_origin(holds) is list:
                objects = get_args(get_args(holds)[0])
                (keys,) = {
                    len(msgspec.structs.fields(one)) + (one.__struct_config__.tag is not None) for one in objects
                }
                yield key.name, keys


def _keys_in(value: Iterable[Any]) -> int:
    """Return how many keys the objects in a decoded list or object have, all together."""
    keys = 0
    if type(value) is dict:
        keys, value = len(value), value.values()
    for one in value:
        if type(one) is dict or type(one) is list:
            keys += _keys_in(one)
    return keys


NAMES_KEPT = 1_000
"""The most keys that are counted by name: hostile rows may have millions."""


class UnreadKeys(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What of the rows of a raw split was not read, or was changed, in `unread.json` and `stats.json`, in rows."""

    unread_keys: dict[str, int]
    """By key; the key of a turn is written `messages.weight`."""

    further_unread_keys: int = 0
    """The sum for all keys beyond NAMES_KEPT: a row counts once for each of them. Absent if there are none."""

    ignored_keys: dict[str, int]
    """By key of `ignore_keys`: the rows whose meaning it would change."""

    unanswered_last_turns: int
    """The rows whose last turn was dropped, because it has no answer."""

    answers_without_mark: int = 0
    """With `thoughts: drop`, the rows with an attempt that stays whole, because it has no `Answer:`. Absent if none."""

    feedback_of_other_form: int = 0
    """With `feedback_form: sentence`, the rows with feedback of another form, which stays as it is. Absent if none."""

    found_kind: str = ""
    """With `kind: auto`, the kind that was found, and why. Absent otherwise."""

    changed_texts: dict[str, int] = {}
    """By rule (`raw_text.RULES`), the rows with a text that it changed. Absent if there are none."""


@dataclass
class Found:
    """What was found in some rows; see UnreadKeys.

    keys: the rows with each unread key. other_keys: their sum for all keys beyond NAMES_KEPT.
    meant: by key, the rows whose meaning it changes. first: by key, the number of the first of these rows, and the
    value there. rows: all rows. last_turns: the rows whose unanswered last turn was dropped. whole_answers,
    raw_feedback: the rows with answers or feedback that were to be changed, and stay as they are. changed: by rule, the
    rows with a text that it changed.
    """

    keys: Counter[str] = field(default_factory=Counter)
    other_keys: int = 0
    meant: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)
    rows: int = 0
    last_turns: int = 0
    whole_answers: int = 0
    raw_feedback: int = 0
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Found") -> None:
        """Add what was found in later rows."""
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
        self.whole_answers += other.whole_answers
        self.raw_feedback += other.raw_feedback
        self.changed += other.changed

    def refuse(self, where: str, dataset: str, meanings: Mapping[str, Meaning], ignored: Collection[str]) -> None:
        """Raise VlmflowError if keys change what rows mean and are not ignored; it names all of them.

        where: the raw files, for the message. meanings: by key.
        """
        if not (stopping := sorted(self.meant.keys() - set(ignored))):
            return
        lines = []
        for key in stopping:
            number, value = self.first[key]
            place = f"first in row {number} (counted from 0), with {value}"
            lines.append(f"  {key}: {self.meant[key]} of {self.rows} rows, {place}: {meanings[key].says}")
        turns = all(meanings[key].turns for key in stopping)
        in_turns = ", or write the keys' content as turns" if turns else ""
        raise VlmflowError(
            "\n".join([f"{where}: the workflow does not read these keys, which change what rows mean:", *lines]),
            f"remove such rows{in_turns}; to train on them as if these keys were absent, add this line to "
            f"datasets.{dataset}: ignore_keys: [{', '.join([*ignored, *stopping])}]",
        )

    def counts(self, ignored: Collection[str]) -> UnreadKeys:
        """Return the counts for the accounts. ignored: the keys that do not stop the conversion."""
        return UnreadKeys(
            unread_keys=dict(sorted(self.keys.items())),
            further_unread_keys=self.other_keys,
            ignored_keys={key: self.meant[key] for key in sorted(ignored) if self.meant[key]},
            unanswered_last_turns=self.last_turns,
            answers_without_mark=self.whole_answers,
            feedback_of_other_form=self.raw_feedback,
            changed_texts=dict(sorted(self.changed.items())),
        )
