"""A run on rows without pictures, of a text model whose folder is full of traps, from raw rows to merged weights."""

import json
import os
import pickle
import sys
from pathlib import Path

import yaml

from forked_snakemake import called
from tiny_models import write_text_model
from workflow_runs import ROOT

SWIFT_ARGS = yaml.safe_load((ROOT / "config.yaml").read_text())["runs"]["qwen3-alpaca"]["train"]["swift_args"]

TRAIN = {
    "max_steps": 8,
    "checkpoint_steps": 4,
    "evaluation_steps": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "dtype": "float32",
    "max_length": 512,
    "dataloader_workers": 0,
    "swift_args": SWIFT_ARGS,
}

TRAPS = {
    "README.md",
    "args.json",
    "configuration_x.py",
    "custom_generate/generate.py",
    "evil.so",
    "modeling_x.py",
    "outside.pem",
    "plugin.py",
    "pytorch_model.bin",
    "sitecustomize.py",
    "training_args.bin",
    "we\\nird.json",
}
"""The additional files in the folder, as the log and provenance.json name them."""


class Fires:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.file),))


def set_traps(folder: Path, fired: Path) -> None:
    """Add the traps to a model's folder; each trap that runs creates a file of its name in `fired`."""
    fired.mkdir()
    for name in ("configuration_x", "custom_generate/generate", "modeling_x", "plugin", "sitecustomize"):
        (folder / name).parent.mkdir(exist_ok=True)
        mark = fired / Path(name).name
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef generate(*_, **__): ...\n")
    for name in ("pytorch_model.bin", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Fires(fired / name)))
    # ms-swift reads its own arguments from a model's folder; these name Python files to import.
    args = {"external_plugins": [str(folder / "plugin.py")], "swift_version": "4.6.0"}
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "README.md").write_text("# Not this card\n")
    (folder / "evil.so").write_bytes(b"\x7fELF")
    (folder / "we\nird.json").write_text("{}")
    (folder / "LICENSE").write_text("All yours.\n")
    (fired.parent / "secret").write_text("not to be published")
    (folder / "outside.pem").symlink_to(fired.parent / "secret")


def run_without_pictures(folder: Path) -> str:
    """Make merged weights in `folder`, and return what Snakemake printed.

    The base is a Qwen3 of 60,000 weights (`tiny`), which are trained themselves; the demo's model is beside it (`vl`).
    Each trap that is run makes a file in `fired`.
    """
    write_text_model(folder)
    set_traps(folder / "tiny", folder / "fired")
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    rows[::4] = [row | {"output": f"{row['output']} In HTML: <video>."} for row in rows[::4]]
    (folder / "rows.json").write_text(json.dumps(rows))
    mine = {
        "models": {"tiny": {"source": "tiny", "model_type": "qwen3"}},
        "datasets": {"alpaca": {"train": "rows.json#60", "system_prompt": "Be brief.", "val_share": 0.1}},
        "runs": {
            "text": {
                "model": "tiny",
                "dataset": "alpaca",
                "device": "cpu",
                "processes": 2,
                "tuner": "full",
                "train": TRAIN,
                "smoke": {"steps": 6, "longest": 4, "sample": 4},
                "verify": {"rows": 2},
            }
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called([*call, "--configfile", str(folder / "mine.yaml"), "--cores", "2", "--", "merged/text"])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said
