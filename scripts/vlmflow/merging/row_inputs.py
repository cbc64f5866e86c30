"""Turns rows into a model's inputs with ms-swift itself; runs in a separate process, whose environment it needs.

    python -m vlmflow.merging.row_inputs ROWS INPUTS --model FOLDER …

ROWS: JSON lines of ShareGPT rows. INPUTS: the output file (`swift.row_attention`). ms-swift's own arguments of model
and template follow. The picture store and the picture budget come from the environment, as for training
(`child_process.environment`).
"""

import os
import sys
from pathlib import Path
from typing import Any

from vlmflow.core.processes import die_with_parent
from vlmflow.swift.child_process import quick_imports


def main() -> None:
    """Encode the rows as training would, each as a batch of its own."""
    die_with_parent(os.getppid())
    rows, inputs, *words = sys.argv[1:]
    with quick_imports():
        from vlmflow.swift.own_template import own_template

        template = own_template(words)
        from safetensors.torch import save_file
        from swift.dataset import load_dataset

        from vlmflow.swift.meta_model import meta_model
        from vlmflow.swift.row_attention import row_tensors

    template.model = meta_model(Path(template.model_info.model_dir))  # Qwen-VL's asks it for the positions of pictures
    dataset, _ = load_dataset([rows], strict=True)
    tensors: dict[str, Any] = {}
    for number, row in enumerate(dataset):
        tensors |= row_tensors(number, template.data_collator([template.encode(row)]))
    save_file(tensors, inputs)


if __name__ == "__main__":
    main()
