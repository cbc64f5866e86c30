"""Begins folders for runs: one of a user's own, and that of the demo on real FIRE rows (`make fire-demo`)."""

import json
import shutil
from pathlib import Path

from vlmflow import CHECKOUT
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file, whole_folder
from vlmflow.harness.stage import run_stage
from vlmflow.tools import make_sample, make_tiny_model

ROWS = 480
"""Rows of the example, of which some are faulty. A tenth of their pictures is val."""


def init(folder: Path) -> None:
    """Write a configuration that runs as it is, a README, Snakemake's profile, and an example of rows and a tiny model.

    Raises VlmflowError if the folder has one of the files.
    """
    copies = {name: CHECKOUT / "recipes" / "init" / name for name in ("my-run.yaml", "README.md")}
    copies["profiles/default/config.yaml"] = CHECKOUT / "profiles" / "default" / "config.yaml"
    if there := [name for name in (*copies, "example") if (folder / name).exists()]:
        raise VlmflowError(f"{folder} has {', '.join(there)} already", "name another folder, or move them away")
    with whole_folder(folder / "example") as example:
        make_sample.main(folder=example / "rows", train_rows=ROWS, test_rows=8)
        make_tiny_model.main(folder=example / "tiny-model", text=[example / "rows" / "FIRE-train-100K.json"])
    for name, source in copies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    print(f"{folder} has {', '.join(copies)}, example. Next: cd {folder} && vlmflow run my-run.yaml -n")


def main(*, fire: Path, folder: Path) -> None:
    """Write `my-run.yaml` and `tiny-model/` into `folder`; an identical model stays unchanged.

    fire: the folder with FIRE-train-100K.json, FIRE-test.json, and the pictures under images/.

    Raises VlmflowError if a JSON file is missing.
    """
    splits = {"train": fire.resolve() / "FIRE-train-100K.json", "test": fire.resolve() / "FIRE-test.json"}
    for file in splits.values():
        if not file.is_file():
            raise VlmflowError(
                f"{file} does not exist", "run make fire-demo FIRE=FOLDER on a folder with both JSON files and images/"
            )
    dataset = {**{split: str(file) for split, file in splits.items()}, "image_roots": [str(fire.resolve() / "images")]}
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / "my-run.yaml", "w") as overlay:
        # JSON is YAML, with every path quoted.
        json.dump({"datasets": {"fire": dataset}}, overlay, indent=1)
    make_tiny_model.main(folder=folder / "tiny-model", text=list(splits.values()))


if __name__ == "__main__":
    run_stage(main)
