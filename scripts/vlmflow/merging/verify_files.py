"""Verifies that a merged folder has the files of its base, and weights with the base's layout."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import FOLDER_MARK, read_json
from vlmflow.fetch.model_files import CONFIG, FETCH_AGAIN, INDEX, SINGLE
from vlmflow.fetch.model_weights import WEIGHT_SUFFIXES
from vlmflow.fetch.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from vlmflow.merging.proof import WRITTEN_AFTERWARDS

TOKENIZER = frozenset({"tokenizer_config.json"})
PROCESSOR = frozenset({"preprocessor_config.json", "processor_config.json"})
"""Files of which a model needs one: every model one of the first, a vision model also one of the second."""

BLOCK_BYTES = 1 << 20

MERGE_AGAIN = "remove the merged folder and run the same command again; if this happens again, please report it"


def verify_files(base: Path, merged: Path, files: Collection[str]) -> list[str]:
    """Compare everything but the weights' numbers; returns the names of the shards.

    base: the base model's folder. files: the names of the model's files in it.

    Raises VlmflowError with the file that the base lacks for use without network, or that is missing, new or changed in
    `merged`; or with the tensor at which a shard's layout differs from the base's.
    """
    shards = shard_names(base, files)
    _require_usable(base, set(files))
    present = {path.relative_to(merged).as_posix() for path in merged.rglob("*") if not path.is_dir()}
    present.discard(FOLDER_MARK)
    for name in sorted(set(files) - present):
        if name in shards or name == INDEX or not name.endswith(WEIGHT_SUFFIXES):
            raise VlmflowError(f"{merged / name}: is missing; the base has it", MERGE_AGAIN)
    for name in sorted(present):
        if name not in files and name not in WRITTEN_AFTERWARDS:
            raise VlmflowError(f"{merged / name}: the base has no such file", MERGE_AGAIN)
        if name in shards:
            _compare_layout(base / name, merged / name)
        elif name not in WRITTEN_AFTERWARDS and not _same_bytes(base / name, merged / name):
            raise VlmflowError(f"{merged / name}: differs from the base's file", MERGE_AGAIN)
    return shards


def shard_names(base: Path, files: Collection[str]) -> list[str]:
    """Return the names of the files with the weights, as transformers finds them."""
    return [SINGLE] if SINGLE in files else sorted(set(read_json(base / INDEX)["weight_map"].values()))


def _require_usable(base: Path, files: set[str]) -> None:
    """Require the files without which the model does not load offline."""
    needed = [frozenset({CONFIG}), TOKENIZER]
    if "vision_config" in read_json(base / CONFIG):
        needed.append(PROCESSOR)
    for choice in needed:
        if not files & choice:
            raise VlmflowError(f"{base}: has no {' or '.join(sorted(choice))}", FETCH_AGAIN)


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while block := first.read(BLOCK_BYTES):
            if block != second.read(BLOCK_BYTES):
                return False
    return True


def _compare_layout(base: Path, merged: Path) -> None:
    """Require the base's layout of a shard: the same length and, byte for byte, the same header."""
    size, expected_size = merged.stat().st_size, base.stat().st_size
    if size != expected_size:
        state = "truncated" if size < expected_size else "too long"
        raise VlmflowError(f"{merged}: {state}: {size:,} bytes, the base has {expected_size:,}", MERGE_AGAIN)
    header, expected = _header(merged), _header(base)
    if header == expected:
        return
    try:
        tensors, base_tensors = (_described(raw) for raw in (header, expected))
    except ValueError as error:
        raise VlmflowError(f"{merged}: its header cannot be read: {error}", MERGE_AGAIN) from None
    for name in sorted(base_tensors.keys() | tensors.keys()):
        if tensors.get(name) != base_tensors.get(name):
            raise VlmflowError(
                f"{merged}: tensor {name} is {tensors.get(name, 'missing')}, in the base "
                f"{base_tensors.get(name, 'missing')}",
                MERGE_AGAIN,
            )
    raise VlmflowError(f"{merged}: its header is written differently from the base's", MERGE_AGAIN)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))


def _described(header: bytes) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(header[LENGTH_BYTES:])
    return described
