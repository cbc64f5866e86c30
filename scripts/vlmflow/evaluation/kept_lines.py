"""Results that are kept, a line each: nothing is computed twice, after a kill or for the base of another run.

    <stores.evaluations>/<kind>/<digest of a model and how it is asked>/<time>-<random>.jsonl

Each computing process writes a file of its own, so writers need no lock. A line that a kill cut is left out when the
files are read.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec


class Keyed(Protocol):
    """A line, which belongs to one key."""

    @property
    def key(self) -> str:
        """What it is the result of."""
        ...


Line = TypeVar("Line", bound=Keyed)
Form = TypeVar("Form")


class KeptLines(Generic[Line]):
    """The results of one model, computed in one way.

    folder: `stores.evaluations`. kind: the name of its folder there. meaning: everything but the key that determines a
    result, as JSON: the model's digest, types, limits, versions. form: the type of a line.
    """

    def __init__(self, folder: Path, kind: str, meaning: dict[str, Any], form: type[Line]) -> None:
        digest = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = folder / kind / digest
        self._form = form

    def new_file(self) -> Path:
        """Return the name of a new file for one process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.jsonl"

    def read(self) -> dict[str, Line]:
        """Return all whole lines, by their keys."""
        files = sorted(self._folder.glob("*.jsonl"))
        return {kept.key: kept for file in files for kept in whole_lines(file, self._form)}


def whole_lines(file: Path, form: type[Form]) -> Iterator[Form]:
    """Yield the lines of a file, decoded as `form`, without those that a kill cut."""
    decoder = msgspec.json.Decoder(form)
    for line in file.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            with suppress(ValueError):  # DecodeError, or bytes that are no text
                yield decoder.decode(line)
