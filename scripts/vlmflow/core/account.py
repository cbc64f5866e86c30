"""Accounts: the JSON files in which a stage records its work, each written and read by one type; and lines of JSON.

The type is in the folder of the code that writes the account: a `msgspec.Struct`, whose fields are the file's keys, or
a `dict` with a name of its own if the keys are names of files. Paths are stored as texts.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json, target_of, write_json

T = TypeVar("T")


class OtherVersionError(VlmflowError):
    """An account lacks a field of its type, or the field has another type: another version may have written it."""


MAKE_AGAIN = "remove it and run the same command again"

MISSING = re.compile(r"Object missing required field `(.+)`")
"""msgspec's message for a missing key."""


def write_account(path: Path, account: msgspec.Struct | dict[str, Any]) -> None:
    """Write an account as indented JSON, whole or not at all; keys are in the order of the type's fields."""
    write_json(path, msgspec.to_builtins(account, enc_hook=_as_text))


def read_account(path: Path, kind: type[T]) -> T:
    """Read an account; keys that its type does not have are ignored.

    kind: the type; also `list[str]` if the file is a plain list.

    Raises VlmflowError with the file if it is missing or not JSON; OtherVersionError with the file and the field if a
    field is missing or has another type.
    """
    content = read_json(path)
    try:
        return msgspec.convert(content, kind, str_keys=True, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise OtherVersionError(
            f"{path}: {_in_plain_words(error)}",
            f"another version of vlmflow may have written it: remove {target_of(path)} and run the same command again",
        ) from None


def read_lines(file: Path, kind: type[T], next_step: str = MAKE_AGAIN) -> Iterator[T]:
    """Yield the lines of a file of JSON lines, each decoded as `kind`, so that memory does not grow with them.

    Raises VlmflowError if the file is missing, or with the line if one is not of this kind.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        lines = file.open("rb")
    except OSError as error:
        raise VlmflowError(f"{file}: {error.strerror}", next_step) from None
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                decoded = decoder.decode(line)
            except ValueError as error:
                raise VlmflowError(f"{file}, line {number}: {error}", next_step) from None
            yield decoded


def _in_plain_words(error: msgspec.ValidationError) -> str:
    """Return the fault after its field ("train.kept is missing"); msgspec has the field last, or in backquotes."""
    fault, _, place = str(error).partition(" - at ")
    fields = place.strip("`").removeprefix("$").removeprefix(".")
    if missing := MISSING.fullmatch(fault):
        return f"{fields}{'.' if fields else ''}{missing[1]} is missing"
    return f"{fields}: {fault}" if fields else fault


def _as_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no account can hold a {type(value).__name__}")


def _from_text(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
