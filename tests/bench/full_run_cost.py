"""What a full run costs, as README's table: python tests/bench/full_run_cost.py [FOLDER]

Each line is a recipe (recipes/), or a run like them, estimated without a GPU: by arithmetic, not measured. The rows are
the mean row of FIRE-train-100K; or those of FOLDER, the working directory of `make fire-demo`, as often as the data set
has rows.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from vlmflow.config.gpus import GPUS
from vlmflow.config.run_settings import RunSettings
from vlmflow.estimate.changes import FITS, longest_that_fits, share
from vlmflow.estimate.memory import memory
from vlmflow.estimate.run import EstimateInput, RowLengths, inputs_of
from vlmflow.estimate.shape import ModelShape, read_shape
from vlmflow.estimate.times import times

ROOT = Path(__file__).resolve().parents[2]

PUBLISHED = ROOT / "tests" / "published"
"""Folders with the config.json of published models."""

RECIPES = ROOT / "recipes"

ROWS, VAL_ROWS = 102_842, 2_099
"""Rows of FIRE-train-100K.json (104,941 by its data card), of which a val_share of 0.02 is taken."""

MEAN_ROW = (258, 358)
"""Text and picture tokens: the mean of 84 real rows, with 4.2 characters and 1,024 pixels a token."""

LONGEST = 32_768
"""The highest max_length that is tried."""

SMALLEST, LARGEST = 1_024, 131_072
"""Tokens of the micro-batches that are tried; each is a multiple of the smallest."""

INSTEAD = "h100"
"""Another product for the hours of runs that need 80 GB."""

MACHINE = 8
"""GPUs of one machine."""


@dataclass(frozen=True)
class Line:
    """A line of the table: a model's name, and the settings of the run."""

    model: str
    settings: RunSettings


def lines() -> list[Line]:
    """Return the runs of the recipes, those of small models first, and full fine-tuning of the 32B on two nodes."""
    found = [_of_recipe(file) for file in sorted(RECIPES.glob("*.yaml"))]
    methods = ("qlora", "lora", "full")
    found.sort(key=lambda line: ("32B" in line.model, methods.index(line.settings.tuner)))
    (largest,) = (line for line in found if line.settings.tuner == "full")
    both = {"strategy": "zero3", "nodes": 2, "processes": MACHINE}
    return [*found, Line("Qwen3-VL-32B-Instruct", largest.settings.model_copy(update=both))]


def _of_recipe(file: Path) -> Line:
    content = yaml.safe_load(file.read_text())
    (model,) = content["models"].values()
    (run,) = content["runs"].values()
    return Line(model["source"].rpartition("/")[2], RunSettings.model_validate(run))


def inputs_for(line: Line, train: RowLengths, val: RowLengths, **changes: object) -> EstimateInput:
    """Return what is estimated of a line's run with some rows. changes: of its `train` block."""
    settings = line.settings
    changed = settings.model_copy(update={"train": settings.train.model_copy(update=changes)})
    return inputs_of(_shape(line), changed, train, val)


def _shape(line: Line) -> ModelShape:
    return read_shape(PUBLISHED / line.model)


def full_rows(line: Line, max_length: int) -> RowLengths:
    """Return rows of every length up to `max_length`, each with one picture of the whole budget."""
    picture = line.settings.train.image_max_tokens
    lengths = range(64, max_length + 1, 64)
    return RowLengths.of([(max(tokens - picture, 1), min(picture, tokens - 1)) for tokens in lengths])


def longest(line: Line) -> int:
    """Return the highest max_length that fits the line's product."""
    rows = full_rows(line, LONGEST)
    return longest_that_fits(inputs_for(line, rows, rows, max_length=LONGEST), GPUS[line.settings.gpu])


def table(train: RowLengths, val: RowLengths) -> str:
    """Return the table in Markdown."""
    heads = ["model", "method", "GPUs", "memory of each", "fits up to", "hours, a row at a time", "hours, planned"]
    heads.append(f"planned, on {GPUS[INSTEAD].title}")
    rows = [_cells(line, train, val) for line in lines()]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows])


def _cells(line: Line, train: RowLengths, val: RowLengths) -> str:
    settings, gpu = line.settings, GPUS[line.settings.gpu]
    rows = full_rows(line, settings.train.max_length)
    full, run = inputs_for(line, rows, rows), inputs_for(line, train, val)
    method = {"lora": "LoRA", "qlora": "QLoRA", "full": "full"}[settings.tuner]
    nodes = f"{settings.nodes} × " if settings.nodes > 1 else ""
    other = INSTEAD if GPUS[INSTEAD].memory == gpu.memory else None
    cells = [
        line.model.removesuffix("-Instruct"),
        method if settings.strategy == "ddp" else f"{method}, {settings.strategy}",
        f"{nodes}{settings.processes} × {gpu.title}",
        f"{memory(full).total / 1e9:.0f} GB ({share(full, gpu):.0%})",
        f"{longest(line):,} tokens",
        _hours(run, gpu.name),
        *(_hours(_planned(run, name), name) if name else "" for name in (gpu.name, other)),
    ]
    return f"| {' | '.join(cells)} |"


def _planned(run: EstimateInput, product: str) -> EstimateInput:
    """Return the run with the largest micro-batches that fit a product."""
    return replace(run, micro_batch_tokens=largest_micro_batch(run, int(FITS * GPUS[product].memory)))


def largest_micro_batch(inputs: EstimateInput, room: int) -> int | None:
    """Return the most tokens of a planned micro-batch with which a run needs at most `room` bytes of each GPU.

    It is a multiple of 1,024, up to 131,072; None if not even the smallest fits, or a row alone does not.
    """
    low, high = 0, LARGEST // SMALLEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory(replace(inputs, micro_batch_tokens=middle * SMALLEST)).total <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * SMALLEST or None


def _hours(run: EstimateInput, product: str) -> str:
    fast, slow = (times(run, GPUS[product], fast=fast).hours for fast in (True, False))
    return f"{fast:.1f} to {slow:.1f}" if slow < 10 else f"{fast:.0f} to {slow:.0f}"


def rows_of(folder: Path | None) -> tuple[RowLengths, RowLengths]:
    """Return the rows of train and val: the mean row, or those of a working directory, as often as FIRE has rows."""
    if folder is None:
        return RowLengths.of([MEAN_ROW] * ROWS), RowLengths.of([MEAN_ROW] * VAL_ROWS)
    lengths = folder / "lengths" / "qwen3vl-fire"
    if not (lengths / "train.jsonl").is_file():
        sys.exit(f"{folder}: no lengths of a FIRE run are there; first: make fire-demo FIRE=FOLDER")
    both = RowLengths.read(lengths / "train.jsonl")
    pairs = list(zip(both.text.tolist(), both.pictures.tolist(), both.trained.tolist(), strict=True))
    return tuple(RowLengths.of((pairs * (count // len(pairs) + 1))[:count]) for count in (ROWS, VAL_ROWS))


if __name__ == "__main__":
    print(table(*rows_of(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
