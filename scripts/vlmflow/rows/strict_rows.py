"""Decoders of rows that have just one set of keys: they refuse every other row, and a key that is given twice.

What a conversion did not read, and changed, counted: the part of its account that is the same for all forms.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vlmflow.config.raw_forms import Meaning
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.rewritten import key_fault


def ignoring(dataset: str, keys: Collection[str], why: str = "") -> str:
    """Return the advice that makes a data set's keys ignored. why: with `kind: auto`, `found_kind.Found.why`."""
    kind = f"kind: {why.partition(':')[0]}, " if why else ""  # only named kinds have ignore_keys
    return f"add {'these lines' if why else 'this line'} to datasets.{dataset}: {kind}ignore_keys: [{', '.join(keys)}]"


ESCAPED_COLON = re.compile(rb"\\(?=u003[aA])").search

Names = tuple[str, ...]
"""Unread keys."""


NO_OBJECT = str | int | float | bool | list[Any] | None


def strict_type(
    kind: type[msgspec.Struct], unread: Names, changed: list[Any], objects: Collection[str]
) -> type[msgspec.Struct]:
    """Return the type of objects that have just the keys of `kind` and these unread keys, as unread0, unread1 ….

    changed: fields that replace those of `kind`. objects: the unread keys whose values may be objects.
    """
    keys = [
        (f"unread{number}", Any if key in objects else NO_OBJECT, msgspec.field(name=key))
        for number, key in enumerate(unread)
    ]
    return msgspec.defstruct(
        kind.__name__, [*changed, *keys], bases=(kind,), kw_only=True, forbid_unknown_fields=True, gc=False
    )


def row_decoder(kind: type[msgspec.Struct], otherwise: Callable[[bytes], Any] | None = None) -> Callable[[bytes], Any]:
    """Return the function that decodes a row of this type, and refuses it (ValidationError) if a key is given twice.

    The search for such a key takes longer than the whole conversion of a row. A decoder loses the first value, with the
    colon before it. So the search is needed only if the decoded row, encoded again, has another number of colons, or if
    the row has escaped ones, which an encoder writes as themselves.

    kind: a type whose encoder writes no key that a row lacks. otherwise: decodes the rows that are not of this type.
    """
    strict, encode_into, again = msgspec.json.Decoder(kind).decode, msgspec.json.Encoder().encode_into, bytearray()

    def decode(row: bytes) -> Any:
        try:
            raw = strict(row)
        except msgspec.ValidationError:
            if otherwise is None:
                raise
            return otherwise(row)
        try:
            encode_into(raw, again)
            colons = again.count(b":")
        except (OverflowError, RecursionError):  # a number of more than 64 bits, or a value that is too deep
            colons = -1
        if (colons != row.count(b":") or ESCAPED_COLON(row)) and key_fault(row):
            raise msgspec.ValidationError
        return raw

    return decode


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

    def refuse(
        self, where: str, dataset: str, meaning: Callable[[str], Meaning], ignored: Collection[str], why: str = ""
    ) -> None:
        """Raise VlmflowError if keys change what rows mean and are not ignored; it names all of them.

        where: the raw files, for the message. meaning: returns that of a key. why: see `ignoring`.
        """
        if not (stopping := sorted(self.meant.keys() - set(ignored))):
            return
        lines = []
        for key in stopping:
            number, value = self.first[key]
            example = f"first in row {number} (counted from 0), with {value}"
            lines.append(f"  {key}: {self.meant[key]} of {self.rows} rows, {example}: {meaning(key).says}")
        turns = all(meaning(key).turns for key in stopping)
        in_turns = ", or write the keys' content as turns" if turns else ""
        raise VlmflowError(
            "\n".join([f"{where}: the workflow does not read these keys, which change what rows mean:", *lines]),
            f"remove such rows{in_turns}; to train on them as if these keys were absent, "
            + ignoring(dataset, [*ignored, *stopping], why),
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
