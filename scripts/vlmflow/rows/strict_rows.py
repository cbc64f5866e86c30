"""Decoders of rows that have just one set of keys: they refuse every other row, and a key that is given twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, get_args, get_origin

import msgspec
from msgspec import UNSET

from vlmflow.raw.row_keys import MARKS, key_fault

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
    for field in msgspec.structs.fields(kind):
        for holds in get_args(field.type):
            if get_origin(holds) is list:
                objects = get_args(get_args(holds)[0])
                (keys,) = {
                    len(msgspec.structs.fields(one)) + (one.__struct_config__.tag is not None) for one in objects
                }
                yield field.name, keys


def _keys_in(value: Iterable[Any]) -> int:
    """Return how many keys the objects in a decoded list or object have, all together."""
    keys = 0
    if type(value) is dict:
        keys, value = len(value), value.values()
    for one in value:
        if type(one) is dict or type(one) is list:
            keys += _keys_in(one)
    return keys
