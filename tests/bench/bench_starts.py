"""The cost of starts: the seven jobs from raw rows to validated data, a plan of the pipeline, ms-swift's imports.

Run alone: python tests/bench/bench_starts.py [ROWS]; it takes 1 GB in the working directory.

Each figure has the processor time of all its processes, which is meaningful on a busy machine too. The yardstick is
the import of Snakemake, and for ms-swift that of torch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from bulk_rows import write_fire_rows

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
TEST_ROWS = 1_000
TRAINER = """
from vlmflow.swift.child_process import quick_imports

with quick_imports():
    from vlmflow.swift.own_template import refuse_remote_code

    refuse_remote_code()
    from swift import sft_main
    from swift.callbacks import callbacks_map
"""
"""What vlmflow.in_trainer.process imports first."""

WITH_CLIENTS = """
import boto3, kubernetes.client, kubernetes.config
from snakemake.cli import main

main(["-n", "merged/qwen3vl-fire"])
"""
"""A plan that imports the clients of Kubernetes and S3, as Snakemake's plugins do (envs/quick_plugins.py)."""

PLAIN = TRAINER.replace("with quick_imports():", "if True:")
"""The same as Python does it."""


def bench_starts(folder: Path, rows: int = 100_000) -> dict[str, Any]:
    """Measure the starts, each warm, as the least of some rounds. folder: an empty folder, to be filled.

    Returns the seconds from raw rows to stats.json (goal: 9 at most on two cores for 100,000 rows), of a plan for
    merged weights, and of the imports, with their ratios to the yardsticks.
    """
    settings = prepare(folder, rows)
    snakemake = [str(Path(sys.executable).with_name("snakemake"))]
    commands = {
        "import_of_snakemake": [sys.executable, "-c", "import snakemake.cli"],
        "plan": [*snakemake, "-n", "merged/qwen3vl-fire"],
        "plan_with_clients": [sys.executable, "-c", WITH_CLIENTS],
        "import_of_torch": [sys.executable, "-c", "import torch"],
        "imports_of_a_trainer": [sys.executable, "-c", TRAINER],
        "plain_imports_of_a_trainer": [sys.executable, "-c", PLAIN],
    }
    took: dict[str, list[tuple[float, float]]] = {}
    for number in range(ROUNDS):
        fresh = [*snakemake, "--directory", str(folder / f"run-{number}"), "--configfile", str(settings)]
        for name, command in {"data": [*fresh, "--", "data/fire/stats.json"], **commands}.items():
            took.setdefault(name, []).append(seconds(command))
    least = {name: tuple(map(min, zip(*rounds, strict=True))) for name, rounds in took.items()}
    figures: dict[str, Any] = {"rows": rows}
    for name, (wall, processor) in least.items():
        figures |= {f"{name}_seconds": round(wall, 2), f"{name}_processor_seconds": round(processor, 2)}
    for name, yardstick in (
        ("data", "import_of_snakemake"),
        ("plan", "import_of_snakemake"),
        ("plan_with_clients", "import_of_snakemake"),
        ("imports_of_a_trainer", "import_of_torch"),
        ("plain_imports_of_a_trainer", "import_of_torch"),
    ):
        figures[f"{name}_over_{yardstick}"] = round(least[name][0] / least[yardstick][0], 1)
    return figures


def prepare(folder: Path, rows: int) -> Path:
    """Write raw rows of both splits with their pictures, and a configuration file that names them; return that file."""
    splits = {"train": rows, "test": TEST_ROWS}
    raw = {split: folder / split / f"{split}.json" for split in splits}
    for seed, (split, count) in enumerate(splits.items()):
        raw[split].parent.mkdir()
        write_fire_rows(raw[split], count, seed)
    block = {split: str(file) for split, file in raw.items()}
    roots = [str(file.parent / "pictures") for file in raw.values()]
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"datasets": {"fire": {**block, "image_roots": roots}}}))
    return settings


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command; return its duration, and the processor time of all its processes. Exits if it fails."""
    before = os.times()
    begun = time.perf_counter()
    ours = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - begun, os.times()
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, used


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        print(json.dumps(bench_starts(Path(scratch).resolve(), *map(int, sys.argv[1:])), indent=1))
