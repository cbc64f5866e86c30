"""Counts the tokens of rows with ms-swift's own template, as long as its parent sends some.

    python -m vlmflow.swift.row_counter CONNECTION --model FOLDER …

CONNECTION is the number of an inherited file descriptor, a `multiprocessing.connection.Connection`. Each message is
JSON lines of ShareGPT rows; the answer is a JSON list with [tokens, picture tokens, trained tokens] of each row, or an
object: "failed", the error, and "row", the id of the row. ms-swift's own arguments follow; the working directory is for
this process alone.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlmflow.core.process import die_with_parent
from vlmflow.swift.quick_imports import quick_imports
from vlmflow.swift.shown_row import IGNORED

ROWS = Path("rows.jsonl")
"""The rows of one message, in the working directory."""


def main() -> None:
    """Answer until the parent closes the connection."""
    die_with_parent(os.getppid())
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with quick_imports():
        from vlmflow.swift.own_template import own_template

        template = own_template(sys.argv[2:])
    while True:
        try:
            lines = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_counted(template, lines)).encode())


def _counted(template: Any, lines: bytes) -> list[list[int]] | dict[str, str]:
    from swift.dataset import load_dataset

    ROWS.write_bytes(lines)
    dataset, _ = load_dataset([str(ROWS.absolute())], strict=True)
    counts: list[list[int]] = []
    try:
        counts.extend(_tokens(template, dataset))
    except Exception as error:  # whatever a template raises
        row = json.loads(lines.splitlines()[len(counts)])
        return {"row": str(row["id"]), "failed": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)  # the rows again, as Arrow
    return counts


def _tokens(template: Any, dataset: Any) -> Iterator[list[int]]:
    picture = getattr(template.processor, "image_token_id", None)
    for row in map(template.encode, dataset):
        ids, labels = list(row["input_ids"]), row["labels"]
        yield [len(ids), ids.count(picture), sum(label != IGNORED for label in labels)]


if __name__ == "__main__":
    main()
