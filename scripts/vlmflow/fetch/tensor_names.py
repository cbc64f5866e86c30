"""The names of a model's tensors, from the index or the header of its weights: nothing else of these is read."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.model_files import FETCH_AGAIN, INDEX, SINGLE, shown
from vlmflow.fetch.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, WHOLE_AGAIN

Read = Callable[[int, int], bytes]
"""Returns a file's bytes from one place up to another one, exclusive."""


def tensor_names(folder: Path, names: Collection[str]) -> list[str] | None:
    """Return the names of a model's tensors, sorted; None if neither an index nor the weights in one file are there.

    folder: a folder of the model's files. names: those that it has, and may have without weights.

    Raises VlmflowError for weights without a readable header.
    """
    if INDEX in names:
        return sorted(read_json(folder / INDEX)["weight_map"])
    return names_in_header(folder / SINGLE) if SINGLE in names and (folder / SINGLE).is_file() else None


def names_in_header(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; raises VlmflowError as `read_names` does."""
    with file.open("rb") as content:

        def read(start: int, end: int) -> bytes:
            content.seek(start)
            return content.read(end - start)

        return read_names(read, file.stat().st_size, str(file))


def read_names(read: Read, size: int, what: str) -> list[str]:
    """Return the names of the tensors in a safetensors file, sorted. size: its bytes. what: its name for people.

    Raises VlmflowError if the header is not one.
    """
    length = int.from_bytes(read(0, LENGTH_BYTES), "little") if size > LENGTH_BYTES else size
    try:
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"it would have {length:,} bytes, the file has {size:,}")
        header: dict[str, Any] = json.loads(read(LENGTH_BYTES, LENGTH_BYTES + length))
        return sorted(header.keys() - {"__metadata__"})
    except (ValueError, AttributeError, RecursionError) as error:
        raise VlmflowError(f"{what}: its header cannot be read: {error}", WHOLE_AGAIN) from None


def refuse_other_tensors(folder: Path, names: Collection[str]) -> None:
    """Raise VlmflowError if the index of a model names other tensors than its files have.

    folder, names: the model's files.
    """
    if INDEX not in names:
        return
    weight_map: dict[str, str] = read_json(folder / INDEX)["weight_map"]
    stored = {tensor for shard in set(weight_map.values()) for tensor in names_in_header(folder / shard)}
    for tensor in sorted(stored ^ weight_map.keys()):
        which = "no file has it" if tensor in weight_map else "the index does not name it"
        raise VlmflowError(f"{folder / INDEX}: tensor {shown(tensor)}: {which}: index and shards disagree", FETCH_AGAIN)
