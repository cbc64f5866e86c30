"""Short trainings of the road's rows, each by the road's own stage or by the bare `swift sft`, and their figures."""

import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from gpu.bounded import bounded, end, start
from gpu.road import CORES, ROOT, Road
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.settings import part_of
from vlmflow.in_trainer.messages import Log, read_events
from vlmflow.lengths.count import read_lengths
from vlmflow.lengths.steps import Plan, Planner
from vlmflow.supervisor.launch import environment
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.smoke import timed_steps

WARM_UP = 2
"""The first steps of a training do not count: they load kernels and reserve memory."""

STOPPED_AFTER = 2
"""Steps that the training has logged when it gets its SIGTERM."""


def block(road: Road, train: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a training with the adapter of the road's run. train: its block of that name."""
    return {
        "model_type": "qwen3_vl",
        "train": TrainSettings(**train).on_device(road.device, processes=1).model_dump(mode="json"),
        "device": road.device,
        "nodes": 1,
        "processes": 1,
        "strategy": "ddp",
        "deepspeed": None,
        "tuner": "lora",
    }


def stage(road: Road, name: str, train: dict[str, Any], rows: str = "road") -> list[object]:
    """Return the command of the stage `train_model`. name: of its run. rows: the run whose rows it takes."""
    folder = road.folder
    values = {
        "rows": folder / "fitted" / rows,
        "model": folder / "models" / "random",
        "smoke": folder / "checkpoints" / "road" / "smoke",
        "full": folder / "checkpoints" / name / "full",
        "settings": json.dumps(block(road, train)),
        "picture_store": folder / "stores" / "pictures",
        "run_store": folder / "stores" / "runs",
        "pictures": json.dumps(manifests(road, rows)),
        "threads": CORES,
    }
    words = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", value)]
    return [sys.executable, ROOT / "scripts" / "stages" / "train_model.py", *words]


def manifests(road: Road, rows: str) -> list[str]:
    """Return the manifests of the pictures of a run's rows."""
    dataset = "passes" if rows == "passes" else "rows"
    return [str(road.folder / "images" / dataset / f"{split}.jsonl") for split in ("train", "val")]


def trained(road: Road, name: str, train: dict[str, Any], seconds: float, rows: str = "road") -> dict[str, Any]:
    """Train with the stage `train_model`, and return how it ended and its figures."""
    ended = bounded(stage(road, name, train, rows), road.out / f"{name}.log", seconds)
    return ended.figures | figures_of(events(road, name), train)


def events(road: Road, name: str) -> list[Any]:
    """Return the events of a training, also if it has not ended."""
    files = list((road.folder / "stores" / "runs" / name / "full").glob("*/progress.jsonl"))
    return read_events(files[0]) if files else []


def figures_of(found: Sequence[Any], train: dict[str, Any]) -> dict[str, Any]:
    """Return speed, memory and losses from a training's events. train: its settings."""
    logs = [event for event in found if isinstance(event, Log) and event.loss is not msgspec.UNSET]
    return _figures(
        timed_steps(found)[WARM_UP - 1 :],
        [(event.step * _rows_of_step(train), float(event.loss)) for event in logs],
        max((event.memory for event in logs if event.memory is not msgspec.UNSET), default=None),
    )


def _rows_of_step(train: dict[str, Any]) -> int:
    each = train.get("per_device_batch_size", 1) * train.get("gradient_accumulation_steps", 1)
    return int(train.get("rows_per_step") or each)


def _figures(
    steps: Sequence[tuple[int, float]], losses: list[tuple[int, float]], memory: float | None
) -> dict[str, Any]:
    """steps: tokens without padding, and seconds. losses: with the rows seen."""
    tokens, seconds = (sum(values) for values in zip(*steps, strict=True)) if steps else (0, 0.0)
    return {
        "tokens_per_second": tokens / seconds if seconds else None,
        "step_seconds": seconds / len(steps) if steps else None,
        "measured_steps": len(steps),
        "memory": memory,
        "losses": losses,
    }


def passes(road: Road, seconds: float) -> dict[str, Any]:
    """Train one row a step, and return the time of a step for each length of row."""
    train = road.train(1) | {"micro_batch_tokens": None, "max_length": 32_768, "gradient_checkpointing": True}
    figures = trained(road, "passes", train, seconds, rows="passes")
    of_length: dict[int, list[float]] = {}
    for tokens, took in timed_steps(events(road, "passes"))[WARM_UP - 1 :]:
        of_length.setdefault(tokens, []).append(took)
    groups: list[list[tuple[int, float]]] = []
    for tokens, took in sorted((tokens, took) for tokens, all_of in of_length.items() for took in all_of):
        if not groups or tokens > 1.3 * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((tokens, took))
    measured = [
        {
            "tokens": round(statistics.fmean(tokens for tokens, _ in group)),
            "seconds": statistics.median(took for _, took in group),
        }
        for group in groups
    ]
    return figures | {"passes": measured}


def bare(road: Road, name: str, train: dict[str, Any], seconds: float, **arguments: object) -> dict[str, Any]:
    """Train the same rows with ms-swift alone, with the arguments that the road's trainer gets.

    arguments: ms-swift's, in place of them.
    """
    settings = part_of(FlatRun, block(road, train))
    folder = road.folder
    training = plan_training(
        settings,
        folder / "fitted" / "road",
        folder / "models" / "random",
        folder / "stores" / "pictures",
        [Path(file) for file in manifests(road, "road")],
    )
    output = folder / "bare" / name
    output.mkdir(parents=True)
    words = training.arguments()
    at = words.index("--callbacks")
    own = {
        "model": training.model.folder.absolute(),
        "dataset": training.data.train.absolute(),
        "output_dir": output,
        "report_to": "none",
        "eval_strategy": "no",
        "save_strategy": "no",
        **arguments,
    }
    others = [str(word) for key, value in own.items() for word in (f"--{key}", value)]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=1"]  # as the road's: gloo needs it
    command = [sys.executable, "-m", *torchrun, "-m", "swift.cli.sft", *words[:at], *words[at + 2 :], *others]
    env = environment(training, RunFolder(output), threads=CORES)
    ended = bounded(command, road.out / f"{name}.log", seconds, env)
    sizes = [row.tokens for row in read_lengths(training.data.lengths("train"))]
    plan = Plan(Planner(sizes, 1, 1), training.rows_per_step, training.settings.seed)
    tokens_of_step = [sum(sizes[row] for row in rows) for rows in plan.rows(0)]
    return ended.figures | figures_of_swift(output / "logging.jsonl", tokens_of_step, training.rows_per_step)


def figures_of_swift(log: Path, tokens_of_step: Sequence[int], rows_per_step: int) -> dict[str, Any]:
    """Return the same from the log of ms-swift alone, which has the mean time of all steps so far at each step."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    logged = [line for line in lines if "loss" in line]
    ends = [number * line["train_speed(s/it)"] for number, line in enumerate(logged, start=1)]
    steps = list(zip(tokens_of_step[1:], (late - early for early, late in pairwise(ends)), strict=False))
    losses = [(number * rows_per_step, line["loss"]) for number, line in enumerate(logged, start=1)]
    memory = max((line["memory(GiB)"] * 2**30 for line in logged if "memory(GiB)" in line), default=None)
    return _figures(steps[WARM_UP - 1 :], losses, memory)


def resumed(road: Road, name: str, train: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Train, send SIGTERM to the stage after some steps, and let the same command resume.

    Adds to a training's figures the step at which it was stopped, and the seconds until it had saved and ended.
    """
    begun = time.monotonic()
    command = stage(road, name, train)
    first = start(command, road.out / f"{name}-stopped.log")
    try:
        while first.poll() is None and time.monotonic() - begun < seconds / 2:
            if any(isinstance(event, Log) and event.step >= STOPPED_AFTER for event in events(road, name)):
                break
            time.sleep(0.1)
        asked = time.monotonic()
        first.send_signal(signal.SIGTERM)
        first.wait(max(1.0, seconds - (asked - begun)))
        saved = time.monotonic() - asked
    finally:
        end(first)
    before = max((event.step for event in events(road, name) if isinstance(event, Log)), default=0)
    again = bounded(command, road.out / f"{name}.log", seconds - (time.monotonic() - begun))
    ended = replace(again, seconds=round(time.monotonic() - begun, 1))
    return ended.figures | figures_of(events(road, name), train) | {"stopped_at": before, "saving_seconds": saved}
