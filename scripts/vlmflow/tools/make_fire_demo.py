"""Prepare the demo on real FIRE rows with a tiny model: write its configuration and the model."""

import json
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.harness.stage import run_stage
from vlmflow.tools.make_tiny_model import main as make_tiny_model


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
    make_tiny_model(folder=folder / "tiny-model", text=list(splits.values()))


if __name__ == "__main__":
    run_stage(main)
