"""Reads files of rows for ms-swift: only the columns that it trains on, each with its type.

ms-swift 4.6 lets `datasets` guess all columns and their types from the first 10 MB of a file (packaged_modules/json): a
text that looks like a date there is a time, and the load ends at a later text that does not; or at a column that is
empty there, and filled later.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.files import sha256_of
from vlmflow.rows.sharegpt import has_tools


class _Row(msgspec.Struct):
    """What is trained of a row (`rows/sharegpt`). Turns and tools stay JSON, for ms-swift: keys differ."""

    conversations: msgspec.Raw
    images: list[str] = []
    tools: str | None = None


def read_rows_by_type() -> None:
    """Make ms-swift read each file in this process as JSON lines of rows."""
    from swift.dataset import loader

    loader.hf_load_dataset = _load_rows


def _load_rows(kind: str, *, data_files: str, cache_dir: str, **others: Any) -> Any:
    """Take the place of `datasets.load_dataset` in ms-swift's loader.

    The rows are Arrow in `cache_dir`, under the file's digest, for all processes of this machine.
    """
    from datasets import Dataset, Features, List, Value

    columns = {"conversations": Value("string"), "images": List(Value("string"))}
    with open(data_files, "rb") as lines:
        tools = any(map(has_tools, lines))
    features = Features(columns | ({"tools": Value("string")} if tools else {}))
    digest = sha256_of(Path(data_files))
    given = {"file": data_files, "tools": tools}
    return Dataset.from_generator(_rows, features, cache_dir, gen_kwargs=given, fingerprint=digest)


def _rows(file: str, tools: bool = False) -> Iterator[dict[str, Any]]:
    decoder = msgspec.json.Decoder(_Row)
    with open(file, "rb") as lines:
        for line in lines:
            row = decoder.decode(line)
            columns = {"conversations": bytes(row.conversations).decode(), "images": row.images}
            yield columns | {"tools": row.tools} if tools else columns
