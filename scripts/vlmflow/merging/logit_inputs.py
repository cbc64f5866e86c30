"""The inputs of the proof by logits: rows in ms-swift's template and collator, as the trainers make them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from vlmflow.merging import row_inputs
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment, run_module
from vlmflow.swift.row_tensors import Inputs, rows_in


def inputs_of(
    rows: Sequence[ShareGptRow], arguments: dict[str, object], pictures: Path, image_max_tokens: int, threads: int = 1
) -> list[Inputs]:
    """Return the inputs of each row.

    arguments: ms-swift's, of a model's folder and its template (`template_arguments`). pictures: the store of the rows'
    pictures. image_max_tokens: see TrainSettings. threads: the number of cores to use.

    Raises VlmflowError if ms-swift does not load the folder's processor offline, or refuses a row.
    """
    with tempfile.TemporaryDirectory(prefix="vlmflow-logits-") as scratch:
        folder = Path(scratch)
        lines, made = folder / "rows.jsonl", folder / "inputs.safetensors"
        lines.write_bytes(b"".join(as_line(row, row.images) + b"\n" for row in rows))
        words = [str(lines), str(made), *as_words(arguments)]
        env = environment(pictures, image_max_tokens, folder / "cache", threads)
        run_module(
            row_inputs.__name__, words, folder, env, folder / "log", f"{arguments['model']}: rows for the logits"
        )
        return rows_in(load_file(made))
