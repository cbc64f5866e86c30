"""The workflow's configuration for the check, and its calls of Snakemake."""

import csv
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.bounded import Ended, bounded
from gpu.long_rows import LONGEST, lengths_of_rows, write_rows
from vlmflow.config.gpus import GPUS
from vlmflow.core.account import read_account
from vlmflow.core.processes import import_path
from vlmflow.estimate.account import Estimate, compare, read_estimate
from vlmflow.supervisor.report import TrainingReport

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
PASSES = (616, 2048, 8192, 16_384, 24_576)
"""Tokens of the passes whose time is measured."""

REPEATED = 4
"""So many passes of each length."""

STRATEGIES = ("zero2", "zero3", "fsdp2")
"""Those that share a model, tried with one process; they need a GPU."""

PRODUCTS = {
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100-pcie",
    "H200": "h200",
    "A100-SXM4-80GB": "a100-80gb",
    "A100-SXM4-40GB": "a100-40gb",
    "L40S": "l40s",
    "RTX 4090": "rtx-4090",
    "RTX 3090": "rtx-3090",
    "RTX 5090": "rtx-5090",
}
"""Products of the estimate, by what torch calls the card."""


@dataclass(frozen=True)
class Scale:
    """The amount of work. rows, val: of the splits. shrink: what tokens and rows of a step are divided by."""

    rows: int
    val: int
    shrink: int
    train: dict[str, Any]


REAL = Scale(160, 16, 1, {"learning_rate": 2e-4, "micro_batch_tokens": "auto"})
SMALL = Scale(24, 4, 8, {"learning_rate": 1e-2, "micro_batch_tokens": 512, "dataloader_workers": 0, "dtype": "float32"})


@dataclass(frozen=True)
class Road:
    """A working folder with rows, a model, a configuration, and what Snakemake makes of them.

    out: the folder of logs. device: cuda or cpu. shape: of the random model.
    """

    folder: Path
    out: Path
    device: str
    shape: str

    @property
    def scale(self) -> Scale:
        """The amount of work on this device."""
        return REAL if self.device == "cuda" else SMALL

    def prepare(self, seconds: float, card: str | None) -> Ended:
        """Write rows, pictures, the model and the configuration. card: torch's name of the GPU."""
        scale, pictures = self.scale, self.folder / "pictures"
        for split, rows in (("train", scale.rows), ("val", scale.val)):
            write_rows(self.folder / f"{split}.json", pictures, lengths_of_rows(rows, scale.shrink), seed=len(split))
        passes = [tokens // scale.shrink for tokens in PASSES for _ in range(REPEATED)]
        write_rows(self.folder / "passes.json", pictures, passes, seed=1)
        self._configure(card)
        words = [self.folder / "base", self.folder / "train.json", self.shape, self.device]
        command = [sys.executable, "-m", "gpu.random_model", *words]
        modules = {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{import_path()}"}
        return bounded(command, self.out / "model.log", seconds, os.environ | modules)

    def _configure(self, card: str | None) -> None:
        kind = {"kind": "fire", "licence": None, "test_share": 0, "image_roots": [str(self.folder / "pictures")]}
        product = next((name for text, name in PRODUCTS.items() if card and text in card), None)
        run = {
            "model": "random",
            "device": self.device,
            "gpu": product,
            "estimate": "ignore",
            "smoke": {"steps": 6, "longest": 8, "sample": 24},
            "verify": {"rows": 2},
        }
        assert product is None or product in GPUS
        ways = {
            "road": {"tuner": "lora"},
            "full": {"tuner": "full"},
            "qlora": {"tuner": "qlora"},
            **{strategy: {"strategy": strategy} for strategy in STRATEGIES if self.device == "cuda"},
        }
        runs = {name: run | way | {"dataset": "rows", "train": self.train(16)} for name, way in ways.items()}
        runs["full"]["train"] |= {"learning_rate": 1e-5 if self.device == "cuda" else 1e-3}
        runs["passes"] = run | {"dataset": "passes", "train": self.train(1) | {"max_length": 4 * LONGEST}}
        splits = {split: str(self.folder / f"{split}.json") for split in ("train", "val")}
        configuration = {
            "models": {"random": {"source": str(self.folder / "base"), "model_type": "qwen3_vl"}},
            "datasets": {"rows": kind | splits, "passes": kind | splits | {"train": str(self.folder / "passes.json")}},
            "runs": runs,
        }
        (self.folder / "run.yaml").write_text(json.dumps(configuration, indent=1))
        evaluated = {"runs": {"road": {"evaluate": {"rows": 8}}}}
        (self.folder / "evaluate.yaml").write_text(json.dumps(evaluated))

    def train(self, rows_per_step: int) -> dict[str, Any]:
        """Return the run's block `train`: an epoch, evaluated once at its end."""
        return self.scale.train | {
            "rows_per_step": max(1, rows_per_step // self.scale.shrink),
            "lr_scheduler": "constant",
            "warmup_ratio": 0,
            "max_length": LONGEST,
            "checkpoint_steps": 1000,
            "evaluation_steps": 1000,
        }

    def snakemake(self, name: str, seconds: float, *targets: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
        """Make some targets.

        Returns how it ended, the seconds of its stages, and the estimate of the run `name` beside what was measured.

        also: configuration files behind the check's own.
        """
        before = self._stages()
        files = [self.folder / file for file in ("run.yaml", *also)]
        call = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", self.folder]
        options = ["--cores", CORES, "--scheduler", "greedy", "--configfile", *files, "--", *targets]
        ended = bounded([*call, *options], self.out / f"{name}.log", seconds)
        new = {stage: took for stage, took in self._stages().items() if stage not in before}
        return ended.figures | {"stages": new} | self._compared(name)

    def _stages(self) -> dict[str, float]:
        """Return the seconds of each stage that has run, by the path of its benchmark."""
        files = sorted((self.folder / "benchmarks").rglob("*.tsv"))
        return {
            str(file.relative_to(self.folder / "benchmarks").with_suffix("")): float(row["s"])
            for file in files
            for row in csv.DictReader(file.open(), delimiter="\t")
        }

    def _compared(self, run: str) -> dict[str, Any]:
        """Return the figures of a run's estimate beside those of its smoke run and of its full run."""
        file = self.folder / "estimates" / f"{run}.json"
        estimate = read_estimate(file) if file.is_file() else None
        compared = []
        for stage in ("smoke", "full"):
            report = self.folder / "checkpoints" / run / stage / "report.json"
            if isinstance(estimate, Estimate) and report.is_file():
                for one in compare(estimate, read_account(report, TrainingReport)):
                    figures = {"estimated": one.estimated, "up_to": one.up_to, "measured": one.measured}
                    compared.append({"name": f"{one.name}, {stage}", "unit": one.unit, **figures, "error": one.error})
        return {"estimate": compared} if compared else {}


def machine(device: str) -> dict[str, Any]:
    """Return the card, its driver, and the versions of what the figures depend on."""
    code = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, sep='\\n')"
    card = _said([sys.executable, "-c", code]) if device == "cuda" else []
    packages = ("torch", "ms-swift", "transformers", "peft", "accelerate", "bitsandbytes", "deepspeed", "snakemake")
    commit = ROOT / "COMMIT"
    return {
        "card": card[0] if card else None,
        "memory": int(card[1]) if card else None,
        "driver": next(iter(_said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])), None),
        "cores": CORES,
        "commit": commit.read_text().strip()
        if commit.is_file()
        else next(iter(_said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])), None),
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _said(command: list[str]) -> list[str]:
    """Return the lines that a program prints; none if it fails or is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
