"""The cost of the workflow's trainer: its step beside a bare `swift sft`, its start, and the way to proven weights.

Run alone: python tests/bench/bench_training.py

Both trainers get the same model, rows and arguments; a timer within transformers' Trainer, the same for both, notes
when each step ends. They train at the same time, each on one core of its own, and change cores from round to round: a
virtual machine's speed varies by a factor of two within minutes, which then slows both alike. The speed is the bare
trainer's median step time over ours; the steps before WARM_UP do not count, nor those during which the other one did
not train.
"""

import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_starts import TRAINER, seconds
from bench_workflow import RUN, demo_command, quietly

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import CALLBACK, BaseModel, Training
from vlmflow.swift.child_process import environment
from vlmflow.training.train import train

OURS_ALONE = {"callbacks": CALLBACK, "ddp_backend": "gloo", "ddp_timeout": "1800"}
"""The arguments that a bare trainer does not get: our callback, and those of torchrun, without which it starts."""

ROUNDS = 12
WARM_UP, STEPS = 20, 140
STUDENT_T = 2.201
"""The 97.5 % quantile of Student's t with ROUNDS - 1 degrees of freedom: an interval of 95 %."""

TIMER = """
import os, sys
if "torch.distributed.run" not in sys.orig_argv and "STEP_TIMES" in os.environ:
    import time, transformers
    after_a_step = transformers.Trainer._maybe_log_save_evaluate

    def noted(self, *args, **kwargs):
        with open(os.environ["STEP_TIMES"], "a") as file:
            file.write(f"{time.time()}\\n")
        return after_a_step(self, *args, **kwargs)

    transformers.Trainer._maybe_log_save_evaluate = noted
"""
"""Python runs this file (sitecustomize) before a trainer's code. transformers calls it once more at its end."""


def bench_training(folder: Path) -> dict[str, Any]:
    """Measure in an empty folder.

    Returns the median step times in ms; our speed relative to the bare trainer's, as the mean of the rounds with its
    interval of 95 % (goal: lower bound 0.95 at least); the seconds from a trainer's start to its first step, and those
    of its imports alone; and in the demo, the seconds from the last step to verified weights.
    """
    (folder / "timer").mkdir()
    (folder / "timer" / "sitecustomize.py").write_text(TIMER)
    snakemake = demo_command(folder)
    quietly([*snakemake, f"fitted/{RUN}"])
    training = job(folder, STEPS)
    rounds = [side_by_side(training, folder / f"round-{number}", folder / "timer") for number in range(ROUNDS)]
    ours, bare = ([one[who] for one in rounds] for who in (our_run, bare_run))
    speeds = [slow / quick for slow, quick in zip(bare, ours, strict=True)]
    mean = statistics.fmean(speeds)
    half = STUDENT_T * statistics.stdev(speeds) / math.sqrt(ROUNDS)
    return {
        "bare_step_ms": round(1000 * statistics.median(bare), 1),
        "our_step_ms": round(1000 * statistics.median(ours), 1),
        "speed_relative_to_bare": f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})",
        "lower_bound_of_speed": round(mean - half, 3),
        "start_to_first_step_seconds": round(seconds_to_first_step(folder), 1),
        "imports_of_a_trainer_seconds": round(min(seconds([sys.executable, "-c", TRAINER])[0] for _ in range(3)), 1),
        "last_step_to_verified_seconds": round(to_verified(snakemake, folder), 1),
    }


def job(folder: Path, steps: int) -> Training:
    """Return a training of the demo's model and rows with one process; it evaluates and saves once, at the end."""
    settings = TrainSettings(
        max_steps=steps,
        checkpoint_steps=steps,
        evaluation_steps=steps,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        image_max_tokens=64,
        dataloader_workers=0,
        dtype="float32",
    )
    rows = folder / "fitted" / RUN
    data = TrainingData(rows / "train.jsonl", rows / "val.jsonl", folder / "stores/pictures/fire", "digest", False)
    return Training(data, BaseModel(folder / "tiny-model", "qwen3_vl", "digest"), settings, "cpu", 1, DDP)


def side_by_side(training: Training, place: Path, timer: Path) -> dict[Any, float]:
    """Train both ways at the same time in a new folder; return the median seconds of a step by way.

    The round's number, at the end of the folder's name, says who gets which core.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if int(place.name.rpartition("-")[2]) % 2:
        cores.reverse()
    place.mkdir()
    ways = {way: place / way.__name__ for way in (our_run, bare_run)}
    running = [
        multiprocessing.get_context("fork").Process(target=on_core, args=(core, way, training, folder, timer))
        for core, (way, folder) in zip(cores, ways.items(), strict=True)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
        if process.exitcode:
            sys.exit(f"a training of {place} failed")
    ends = {way: ends_of_steps(folder) for way, folder in ways.items()}
    begun, ended = max(each[WARM_UP] for each in ends.values()), min(each[-1] for each in ends.values())
    return {way: step_times([end for end in each if begun <= end <= ended]) for way, each in ends.items()}


def on_core(core: int, way: Any, training: Training, place: Path, timer: Path) -> None:
    """Train one way, with all its processes on one core."""
    psutil.Process().cpu_affinity([core])
    way(training, place, timer)


def our_run(training: Training, place: Path, timer: Path) -> None:
    """Train as the workflow does, in a process of its own: it changes the environment."""
    place.mkdir()
    os.environ |= timed(place, timer)
    train(training, place / "runs", len(os.sched_getaffinity(0)), "bench")


def bare_run(training: Training, place: Path, timer: Path) -> None:
    """Train with ms-swift's own command and the same arguments, without our callback."""
    place.mkdir()
    words = training.arguments()
    for name, value in OURS_ALONE.items():
        at = words.index(f"--{name}")
        assert words[at + 1] == value
        del words[at : at + 2]
    paths = {
        "model": training.model.folder,
        "dataset": training.data.train,
        "val_dataset": training.data.val,
        "output_dir": place / "checkpoints",
    }
    places = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    env = environment(training.data.pictures, 64, place / "cache", len(os.sched_getaffinity(0)))
    env |= {"PYTHONPATH": f"{timer}{os.pathsep}{env['PYTHONPATH']}", "STEP_TIMES": str(place / "steps")}
    command = [sys.executable, "-m", "swift.cli.sft", *places, *words]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"swift sft failed:\n{(done.stdout + done.stderr)[-4000:]}")


def seconds_to_first_step(folder: Path) -> float:
    """Return the seconds from the start of a trainer, alone on all cores, to the end of its first step: the least."""
    taken = []
    for number in range(3):
        place = folder / f"start-{number}"
        begun = time.time()
        process = multiprocessing.get_context("fork").Process(
            target=our_run, args=(job(folder, 2), place, folder / "timer")
        )
        process.start()
        process.join()
        taken.append(ends_of_steps(place)[0] - begun)
    return min(taken)


def timed(place: Path, timer: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(timer), "STEP_TIMES": str(place / "steps")}


def ends_of_steps(place: Path) -> list[float]:
    return [float(line) for line in (place / "steps").read_text().split()][:STEPS]


def step_times(ends: list[float]) -> float:
    """Return the median seconds of a step."""
    return statistics.median(after - before for before, after in pairwise(ends))


def to_verified(snakemake: list[str], folder: Path) -> float:
    """Run the demo to its end; return the seconds from its last training step to its proof."""
    (folder / "demo").mkdir()
    env = os.environ | timed(folder / "demo", folder / "timer")
    subprocess.run([*snakemake, f"verified/{RUN}"], env=env, check=True, capture_output=True)
    report = json.loads((folder / "checkpoints" / RUN / "full" / "report.json").read_text())
    stamps = [float(line) for line in (folder / "demo" / "steps").read_text().split()]
    steps = stamps[-report["world_size"] * (report["steps"] + 1) :]  # those of the full training, of all ranks
    last_step = sorted(steps)[-2 * report["world_size"]]  # transformers' last call is not a step
    return (folder / "verified" / RUN / "proof.json").stat().st_mtime - last_step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        print(json.dumps(bench_training(Path(scratch).resolve()), indent=1))
