"""Counts the tokens of rows with ms-swift's own template, as long as its parent sends some.

    python -m vlmflow.swift.row_counter CONNECTION HOW --model FOLDER …

CONNECTION is the number of an inherited file descriptor, a `multiprocessing.connection.Connection`. Each message is
JSON lines of ShareGPT rows; the answer is a JSON list with [tokens, picture tokens, trained tokens] of each row, or an
object: "failed", the error, and "row", the id of the row. HOW: BY_SIZE if pictures may be counted by their sizes
(`counted_row`), WHOLE to encode them. ms-swift's own arguments follow; the working directory is for this process alone.
"""

import json
import os
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlmflow.core.process import die_with_parent
from vlmflow.swift.counted_row import RowCounter
from vlmflow.swift.quick_imports import quick_imports

BY_SIZE, WHOLE = "by-size", "whole"

ROWS = Path("rows.jsonl")
"""The rows of one message, in the working directory."""


def main() -> None:
    """Answer until the parent closes the connection."""
    die_with_parent(os.getppid())
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with quick_imports():
        from vlmflow.swift.own_template import own_template

        counter = RowCounter(own_template(sys.argv[3:]), whole=sys.argv[2] == WHOLE)
    while True:
        try:
            lines = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_counted(counter, lines)).encode())


def _counted(counter: RowCounter, lines: bytes) -> list[list[int]] | dict[str, str]:
    from swift.dataset import load_dataset

    ROWS.write_bytes(lines)
    dataset, _ = load_dataset([str(ROWS.absolute())], strict=True)
    counts: list[list[int]] = []
    try:
        counts.extend(map(counter.count, dataset))
    except Exception as error:  # whatever a template raises
        row = json.loads(lines.splitlines()[len(counts)])
        return {"row": str(row["id"]), "failed": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)  # the rows again, as Arrow
    return counts


if __name__ == "__main__":
    main()
