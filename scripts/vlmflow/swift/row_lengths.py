"""Measures rows with ms-swift itself; runs in a separate process, because it imports torch.

    python -m vlmflow.swift.row_lengths ROWS LENGTHS --model FOLDER …

ROWS: JSON lines of ShareGPT rows. LENGTHS: the output file, a JSON list with the tokens of each row, and those of them
that are trained. ms-swift's own arguments of model and template follow. The picture store and the picture budget come
from the environment, as for training (`child_process.environment`).
"""

import json
import os
import sys
from pathlib import Path

from vlmflow.core.process import die_with_parent
from vlmflow.swift.no_remote_code import refuse_remote_code
from vlmflow.swift.quick_imports import quick_imports
from vlmflow.swift.row_reader import read_rows_by_type

IGNORED = -100
"""The label of a token that is not trained (torch.nn.CrossEntropyLoss, ignore_index)."""


def main() -> None:
    """Encode the rows as training would: pictures are read and scaled, chat marks added."""
    die_with_parent(os.getppid())
    rows, lengths, *words = sys.argv[1:]
    with quick_imports():
        refuse_remote_code()
        read_rows_by_type()
        from swift.arguments import BaseArguments
        from swift.dataset import load_dataset
        from swift.utils import parse_args

    arguments, unknown = parse_args(BaseArguments, words)
    if unknown:
        sys.exit(f"ValueError: unknown arguments: {unknown}")
    template = arguments.get_template()
    template.set_mode("train")
    dataset, _ = load_dataset([rows], strict=True)
    encoded = map(template.encode, dataset)
    tokens = [[len(row["input_ids"]), sum(label != IGNORED for label in row["labels"])] for row in encoded]
    Path(lengths).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
