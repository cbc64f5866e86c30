"""Measures rows with ms-swift itself; runs in a separate process, because it imports torch.

    python -m vlmflow.swift.row_lengths ROWS TENSORS FOUND --model FOLDER …

ROWS: JSON lines of ShareGPT rows. TENSORS: a JSON list with the names of the model's tensors, or null. FOUND: the
output file, JSON. Its "lengths" are the counts of each row (`counted_row`), "by_size" is whether the sizes of pictures
give the same; "example" is the shortest row as the model reads it (`shown_row`); "template" is how the model's own one
differs (`served_rows.first_difference`); "tensors" is how the names differ from those that the model's configuration
needs (`base_tensors.compare_tensors`); "one_sequence" is whether several rows may stand in one sequence.
ms-swift's own arguments of model and template follow. The picture store and the picture budget come from the
environment, as for training (`child_process.environment`).
"""

import json
import os
import sys
from pathlib import Path

from vlmflow.core.processes import die_with_parent
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.row_attention import joins_rows
from vlmflow.swift.row_counter import RowCounter, shown_row


def main() -> None:
    """Encode the rows as training would: pictures are read and scaled, chat marks added."""
    die_with_parent(os.getppid())
    rows, names, found, *words = sys.argv[1:]
    with quick_imports():
        from vlmflow.swift.own_template import own_template

        template = own_template(words)
        from swift.dataset import load_dataset

        from vlmflow.swift.meta_model import compare_tensors
        from vlmflow.swift.served_rows import first_difference

    dataset, _ = load_dataset([rows], strict=True)
    counter = RowCounter(template, whole=True)
    encoded = list(map(template.encode, dataset))
    lengths = list(map(counter.encoded, encoded))
    by_size = lengths == list(map(RowCounter(template, whole=False).count, dataset))
    tokens = [list(row["input_ids"]) for row in encoded]
    read = list(lines_of(Path(rows), ShareGptRow))
    shortest = min(range(len(read)), key=lambda number: len(tokens[number]))
    example = shown_row(template.processor, read[shortest], tokens[shortest], encoded[shortest]["labels"])
    difference = first_difference(template.processor, read, tokens)
    stored = json.loads(Path(names).read_text())
    tensors = {} if stored is None else compare_tensors(Path(template.model_info.model_dir), stored)
    if "model" in tensors:
        tensors["model"] |= {
            "special": list(template.tokenizer.all_special_tokens),
            "pictures": type(getattr(template.processor, "image_processor", "")).__name__.removeprefix("str"),
        }
    account = {"lengths": lengths, "by_size": by_size, "example": example, "template": difference, "tensors": tensors}
    Path(found).write_text(json.dumps(account | {"one_sequence": joins_rows(template)}))


if __name__ == "__main__":
    main()
