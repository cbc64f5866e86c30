"""Counts what the conversion does not read (keys, and last turns without an answer), and the texts that it changes.

An unread key that changes what the row means stops the conversion (see `config.raw_forms`), also one level deep in an
object under a key of any name (`chat_template_kwargs.xml_tools`), and so does one with texts as long as the answers.

Counting costs next to nothing if rows have the same keys. The first row with a set of keys is checked key by key; then
a strict decoder, which accepts just this set, decodes and checks the rows after it. A row that it refuses is checked
key by key again.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Any

import msgspec

from vlmflow.config.raw_forms import Meaning, folded
from vlmflow.config.settings import NOT_IN_COLUMNS
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import shown
from vlmflow.raw.rewritten import OBJECT
from vlmflow.raw.split import RawRows
from vlmflow.raw.table_file import LOOKED_AT
from vlmflow.rows.chat import ASSISTANT, IMAGE_TAG
from vlmflow.rows.raw_text import UnreadKey
from vlmflow.rows.strict_rows import NAMES_KEPT, Found, Names, ignoring, row_decoder, strict_type

SHAPES_KEPT = 32
"""The most sets of keys for which a process makes decoders; rows with other sets are checked key by key."""

NAME_KEPT = 100
"""The most characters of a key that are counted as its name, and the most bytes of a value in a message."""

if TYPE_CHECKING:  # it loads this module
    from vlmflow.rows.convert import MakeRows

Keys = dict[str, msgspec.Raw]
"""The keys of an object, with their values as JSON."""

OF_NESTED = msgspec.json.Decoder(Keys | list[Keys]).decode

KeySet = tuple[Names, tuple[Names, ...], Names]
"""The unread keys of a row, those of the objects under each of its nested keys, all objects having the same, and those
of the first that may hold objects: in this row or in one before."""


@dataclass(slots=True)
class Shape:
    """The rows with one set of unread keys.

    decode: decodes such rows, and refuses all others (`strict_rows`). names: the unread keys. rows: their number.
    """

    decode: Callable[[bytes], Any]
    names: Names
    rows: int = 0


class Unread:
    """Counts what is not read of the rows of one raw split; each process has its own.

    The converter first decodes a row by `shape.decode`. If that succeeds, it increases `shape.rows`; if not, it decodes
    the row in another way, and calls `count`.

    types: two types that rows are decoded as; their keys are the read ones. The first is for rows whose nested objects
    are plain, the second for all rows.
    nested: by key in the file, the type of the objects under it (one object, or a list).
    meanings: see `RawForm.meanings_of`. ignored: their keys that do not stop the conversion.
    assistants: the speakers who give answers, as in the first field of the nested objects.
    account: what was found since the last call of `take`.
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
        self._names = {folded(key): key for key in self.meanings}
        self._inside = any(meaning.inside for meaning in self.meanings.values())
        self._types, self._nested = types, nested
        self._fields = {field.encode_name: field for field in msgspec.structs.fields(types[1])}
        self._nested_keys = {key: _names(held) for key, held in nested.items()}
        self._shapes: dict[KeySet, Shape] = {}
        self._inner: dict[str, set[str]] = {}  # by unread key, the keys without a meaning that objects under it have
        self.account = Found()
        self._changes: Counter[frozenset[str]] = Counter()  # by set of rules: quicker than each rule by itself
        none: KeySet = (), tuple(() for _ in nested), ()
        self.shape = self._shapes.setdefault(none, self._made(*none))

    def changed(self, rules: frozenset[str]) -> None:
        """Count a row with texts that these rules changed (`raw_text.RULES`)."""
        self._changes[rules] += 1

    def in_turns(self, number: int, holder: str, unread: Sequence[UnreadKey]) -> None:
        """Count the unread keys of a usable row's turns, which its form found. holder: the turns' key in the file."""
        self.account.keys.update({f"{holder}.{entry.key}"[:NAME_KEPT] for entry in unread})
        self._weigh(number, ((f"{holder}.{entry.key}", entry.value, entry.answers) for entry in unread))

    def unusable(self, number: int, row: bytes) -> None:
        """Count the keys of a rejected row that change what it means: the whole file may be of another kind.

        Keys of its turns do not count, nor ignored ones.
        """
        try:
            keys = OBJECT(row)
        except (ValueError, RecursionError):
            return
        meant = {self.known(key): value for key, value in keys.items() if key not in self._fields}
        weighed = [(key, value, False) for key, value in meant.items() if key and key not in self.ignored]
        self._weigh(number, weighed)
        self.account.rows += bool(weighed)

    def count(self, number: int, row: bytes) -> None:
        """Count the unread keys of a usable row that `shape.decode` refused. number: that of the row in the split."""
        self.account.rows += 1
        try:
            keys, nested = self._keys_of(row)
        except ValueError:  # an unread key that is not UTF-8 (in files of cp1252); the row's decoders skip it
            keys, nested = self._keys_of(row.decode(errors="replace").encode())
        top = tuple(sorted(keys.keys() - self._fields.keys()))
        paths = set(top)
        inner: list[set[Names]] = []
        for holder, read in self._nested_keys.items():
            inner.append({tuple(sorted(values.keys() - read)) for values in nested[holder]})
            paths.update(f"{holder}.{key}" for names in inner[-1] for key in names)
            if any(inner[-1]):
                self._weigh(number, self._in_objects(holder, nested[holder]))
        self._weigh(number, ((key, keys[key], False) for key in top))
        self.account.keys.update({path[:NAME_KEPT] for path in paths})
        for key in filter(lambda key: self._inside and _is_object(keys[key]), top):
            without = {name for name in _keys_in(keys[key]) if not self.known(f"{key}.{name}")}
            if len(held := self._inner.setdefault(key, set())) < NAMES_KEPT:
                held |= without
        in_turns = (value for holder in nested for item in nested[holder] for value in item.values())
        if all(len(sets) == 1 for sets in inner) and not (self._inside and any(map(_is_object, in_turns))):
            objects = tuple(key for key in top if key in self._inner)
            self._learn((top, tuple(next(iter(sets)) for sets in inner), objects), paths)

    def take(self, columns: Collection[str] = (), first: int = 0) -> Found:
        """Return what was found since the last call. first: the number of the first row since then.

        columns: a table's columns that were not read at all, so all rows have them. Their values are not known: a
        column whose key may change what rows mean counts as if it did in every row.
        """
        account, self.account = self.account, Found()
        for rules, rows in self._changes.items():
            account.changed.update(dict.fromkeys(rules, rows))
        self._changes.clear()
        for shape in self._shapes.values():
            if shape.rows:
                account.rows += shape.rows
                account.keys.update(dict.fromkeys(shape.names, shape.rows))
                shape.rows = 0
        for column in columns if account.rows else ():
            account.keys[column[:NAME_KEPT]] += account.rows
            if path := self.known(column):
                account.meant[path] += account.rows
                account.first[path] = (first, "bytes")
        return account

    def known(self, key: str) -> str:
        """Return the key in `meanings` that is the same but for case and underscores; "" if there is none.

        For a key in an object under an unknown key, whose meaning counts there, too, return its path.
        """
        if len(key) > NAME_KEPT:
            return ""
        if known := self._names.get(folded(key), ""):
            return known
        known = self._names.get(folded(_inside(key)), "")
        return key if known and self.meanings[known].inside else ""

    def meaning(self, path: str) -> Meaning:
        """Return the meaning of a key that `known` returned."""
        return self.meanings.get(path) or self.meanings[self._names[folded(_inside(path))]]

    def _weigh(self, number: int, held: Iterable[tuple[str, Any, bool]]) -> None:
        """Count the keys whose values change what a row means, each once.

        held: keys with their values, decoded or as msgspec.Raw, and whether they are in an assistant's turn.
        """
        done: set[str] = set()
        for key, value, answers in chain.from_iterable(map(_with_inner, held)):
            path = self.known(key)
            if not path or path in done or (self.meaning(path).of_answers and not answers):
                continue
            if _has(self.meaning(path), value):
                done.add(path)
                self.account.meant[path] += 1
                if path not in self.account.first:
                    written = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
                    self.account.first[path] = (number, shown(written[:NAME_KEPT].decode(errors="replace")))

    def _keys_of(self, row: bytes) -> tuple[Keys, dict[str, list[Keys]]]:
        """Return the keys of a row with their values, and by nested key the same for each of its objects."""
        keys = OBJECT(row)
        nested = {holder: OF_NESTED(keys[holder]) for holder in self._nested}
        return keys, {holder: value if isinstance(value, list) else [value] for holder, value in nested.items()}

    def _in_objects(self, holder: str, objects: list[Keys]) -> Iterator[tuple[str, Any, bool]]:
        """Yield the keys of the objects under a nested key, as `_weigh` takes them."""
        spoken_by = msgspec.structs.fields(self._nested[holder])[0].encode_name
        for item in objects:
            answers = msgspec.json.decode(item[spoken_by]) in self._assistants
            yield from ((f"{holder}.{key}", value, answers) for key, value in item.items())

    def _learn(self, keys: KeySet, paths: set[str]) -> None:
        """Make the shape of this set of keys the current one.

        A set has no shape if one of its keys may change what rows mean, because the values must then be checked in
        every row; nor if a key is too long, or a decoder cannot have it.
        """
        if keys not in self._shapes:
            odd = any(self.known(path) or len(path) > NAME_KEPT or NOT_IN_COLUMNS.search(path) for path in paths)
            if odd or len(paths) > NAMES_KEPT or len(self._shapes) == SHAPES_KEPT:
                return
            self._shapes[keys] = self._made(*keys)
        self.shape = self._shapes[keys]

    def _made(self, top: Names, inner: Collection[Names], objects: Names) -> Shape:
        names = [*top, *(f"{holder}.{key}" for holder, keys in zip(self._nested, inner, strict=True) for key in keys)]
        plain, general = self._types
        changed = []
        for (key, held), unread in zip(self._nested.items(), inner, strict=True):
            field, kind = self._fields[key], strict_type(held, unread, [], () if self._inside else unread)
            holds = list[kind] if field.type != held else kind  # type: ignore[valid-type]  # a type made at run time
            changed.append((field.name, holds, msgspec.field(name=key)))
        may_be = objects if self._inside else top
        decode = row_decoder(strict_type(general, top, changed, may_be))
        if not any(inner) and plain is not general:
            decode = row_decoder(strict_type(plain, top, [], may_be), decode)
        if objects:
            decode = _with_known(decode, [(f"unread{top.index(key)}", self._inner[key]) for key in objects])
        return Shape(decode, tuple(names))


def _inside(path: str) -> str:
    """Return the key that one in an object stands for: `tools` for `metadata.tools`, `turns.a` for `turns.b.a`."""
    holder, _, key = path.rpartition(".")
    return f"{holder.rpartition('.')[0]}.{key}".removeprefix(".")


def _with_known(decode: Callable[[bytes], Any], objects: Collection[tuple[str, set[str]]]) -> Callable[[bytes], Any]:
    """Return a decoder that also refuses rows with other keys in unread objects. objects: fields with their keys."""

    def decoded(row: bytes) -> Any:
        raw = decode(row)
        for field, known in objects:
            if type(value := getattr(raw, field)) is dict and not known.issuperset(value):
                raise msgspec.ValidationError
        return raw

    return decoded


def _is_object(raw: msgspec.Raw) -> bool:
    return memoryview(raw)[0] == ord("{")


def _keys_in(raw: msgspec.Raw) -> Collection[str]:
    value = _value(raw)
    return value.keys() if isinstance(value, dict) else ()


def _has(meaning: Meaning, value: Any) -> bool:
    try:
        return meaning.has(_value(value) if isinstance(value, msgspec.Raw) else value)
    except RecursionError:  # a value as deep as this is not empty
        return True


WORD = re.compile(r"(?<!\S)\W*[^\W\d_]{2,}|[\u3040-\u30ff\u3400-\u9fff]{2}")
PROSE = 3
"""So many words make a text more than a name. In Chinese and Japanese, two characters count as a word."""


def refuse_unread_texts(rows: RawRows, make: "MakeRows", dataset: str, why: str = "") -> None:
    """Raise VlmflowError if unread keys hold texts as long as the answers: they may belong to the conversations.

    The first LOOKED_AT rows are looked at. Texts that the training rows have, or that repeat these, are no loss. Names,
    paths and numbers do not count, nor texts of which most rows have the same.

    make: converts rows, and is used for nothing else. why: see `ignoring`.
    """
    unread, columns = make.unread, rows.files[0].unread_texts
    answers, held = list[int](), dict[str, dict[int, str]]()
    for number, row in zip(range(LOOKED_AT), rows, strict=False):
        made = make("", number, row)
        paths = unread.take().keys
        if number in rows.faults or not isinstance(made, list):
            continue
        turns = [(turn.speaker, _plain(turn.value)) for turn in made[-1].conversations]
        answers.append(max(len(text) for speaker, text in turns if speaker in ASSISTANT))
        keys = _value(msgspec.Raw(row))
        of_columns = {key: of_rows[number] for key, of_rows in columns.items() if number < len(of_rows)}
        values = {path: _at(keys, path) for path in paths} | of_columns
        conversation = "\n".join(text for _, text in turns)
        for key, value in values.items():
            texts = [text for text in map(_plain, _texts_in(value)) if len(WORD.findall(text)) >= PROSE]
            lost = [text for text in texts if text not in conversation and any(turn not in text for _, turn in turns)]
            if lost and key not in unread.ignored and not unread.known(key):
                held.setdefault(key, {})[number] = "\n".join(lost)
    lines = []
    for key, of_rows in sorted(held.items()):
        length, of_answers = mean(map(len, of_rows.values())), mean(answers)
        if length >= of_answers and 2 * len(set(of_rows.values())) > len(of_rows):
            first, text = next(iter(of_rows.items()))
            lines.append(
                f"  {key}: {len(of_rows)} of the first {len(answers)} rows, {length:.0f} characters (the answers "
                f"{of_answers:.0f}), first in row {first} (counted from 0), with {shown(text[:NAME_KEPT])}"
            )
        else:
            del held[key]
    if lines:
        raise VlmflowError(
            "\n".join(
                [f"{rows}: the workflow does not read these keys, whose texts are as long as the answers:", *lines]
            ),
            "write what belongs to the conversations into their turns, or name the right keys in columns; to train "
            "without these keys, " + ignoring(dataset, [*unread.ignored, *held], why),
        )


def _plain(text: str) -> str:
    """Return a text without tags of pictures, as one line."""
    return " ".join(text.replace(IMAGE_TAG, " ").split())


def _at(value: Any, path: str) -> Any:
    """Return what is at a path like `messages.content.note`: of lists, a list of what their items have there."""
    if isinstance(value, list):
        return [_at(item, path) for item in value]
    if not isinstance(value, dict) or path in value:
        return value[path] if isinstance(value, dict) else None
    return [_at(value[key], path.removeprefix(f"{key}.")) for key in value if path.startswith(f"{key}.")]


def _texts_in(value: Any, depth: int = 6) -> Iterator[str]:
    """Yield the texts in a value, and in its lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict) and depth:
        for held in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(held, depth - 1)


def _with_inner(entry: tuple[str, Any, bool]) -> Iterator[tuple[str, Any, bool]]:
    """Yield a key with its value, and the keys of the value if that is an object."""
    key, value, answers = entry
    yield entry
    if isinstance(value, msgspec.Raw):
        value = _value(value) if _is_object(value) else None
    if isinstance(value, dict):
        yield from ((f"{key}.{inner}", held, answers) for inner, held in value.items())


def _value(raw: msgspec.Raw) -> Any:
    """Return a decoded value; its JSON as a text if Python cannot decode it."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, OverflowError, RecursionError):
        return bytes(raw).decode(errors="replace")


def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
