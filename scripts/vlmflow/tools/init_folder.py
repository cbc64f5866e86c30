"""Begins a folder for a user's own runs: a configuration that runs as it is, a profile, and a README."""

import shutil
from pathlib import Path

from vlmflow import CHECKOUT
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.tools import make_sample, make_tiny_model

ROWS = 480
"""Rows of the example, of which some are faulty. A tenth of their pictures is val."""


def main(folder: Path) -> None:
    """Write the files of recipes/init into a folder, and generated rows and a tiny model below `example/`.

    Raises VlmflowError if the folder has one of the files.
    """
    begun = CHECKOUT / "recipes" / "init"
    names = [*sorted(file.relative_to(begun) for file in begun.rglob("*") if file.is_file()), Path("example")]
    if there := [str(name) for name in names if (folder / name).exists()]:
        raise VlmflowError(f"{folder} has {', '.join(there)} already", "name another folder, or move them away")
    with whole_folder(folder / "example") as example:
        make_sample.main(folder=example / "rows", train_rows=ROWS, test_rows=8)
        make_tiny_model.main(folder=example / "tiny-model", text=[example / "rows" / "FIRE-train-100K.json"])
    shutil.copytree(begun, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    print(f"{folder} has {', '.join(map(str, names))}. Next: cd {folder} && vlmflow run my-run.yaml -n")
