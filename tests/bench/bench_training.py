"""The cost of the workflow's trainer: its step beside a bare `swift sft`, its start, and the way to proven weights.

Run alone: python tests/bench/bench_training.py

Both trainers get the same model, rows and arguments; a timer within transformers' Trainer, the same for both, notes
when each step ends. Both are started, and then train by turns of SLICE seconds: one is stopped (SIGSTOP) while the
other one has all cores. A virtual machine's speed varies by a factor of two within minutes, but not between turns of
seconds. The speed is the bare trainer's median step time over ours, in neighbouring turns; the steps before WARM_UP do
not count, nor those that a stop interrupted.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_starts import TRAINER, seconds
from bench_workflow import RUN, demo_command, quietly

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import CALLBACK, BaseModel, Training
from vlmflow.swift.child_process import environment

OURS_ALONE = {"callbacks": CALLBACK, "ddp_backend": "gloo", "ddp_timeout": "1800"}
"""The arguments that a bare trainer does not get: our callback, and those of torchrun, without which it starts."""

ROUNDS = 5
WARM_UP, STEPS = 20, 2_000
"""Steps before the first turn; and of the whole training, more than are trained in TURNS."""

TURNS, SLICE = 10, 3.0
"""The turns of each trainer in a round, and the seconds of one."""

STUDENT_T = 2.776
"""The 97.5 % quantile of Student's t with ROUNDS - 1 degrees of freedom: an interval of 95 %."""

TIMER = """
import os, sys
if "torch.distributed.run" not in sys.orig_argv and "VLMFLOW_TEST_STEP_TIMES" in os.environ:
    import time, transformers

    spent = 0.0

    def timed(function):
        def call(*args, **kwargs):
            global spent
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.perf_counter() - begun
        return call

    handler = transformers.trainer_callback.CallbackHandler
    handler.call_event = timed(handler.call_event)
    transformers.Trainer.get_batch_samples = timed(transformers.Trainer.get_batch_samples)
    after_a_step = transformers.Trainer._maybe_log_save_evaluate

    def noted(self, *args, **kwargs):
        global spent
        with open(os.environ["VLMFLOW_TEST_STEP_TIMES"], "a") as file:
            file.write(f"{time.time()} {spent}\\n")
        spent = 0.0
        return after_a_step(self, *args, **kwargs)

    transformers.Trainer._maybe_log_save_evaluate = noted
"""
"""Python runs this file (sitecustomize) before a trainer's code. It notes when each step ends, and the seconds in which
the step waited for its rows and for callbacks: what we add to a step is there, but for the DDP in which accelerate
wraps even one process on the CPU if torchrun started it. transformers calls `noted` once more at its end."""


def bench_training(folder: Path) -> dict[str, Any]:
    """Measure in an empty folder.

    Returns the median step times in ms; our speed relative to the bare trainer's, as the mean of the rounds with its
    interval of 95 % (goal: lower bound 0.95 at least); what we add to a step, in ms, as the range of the rounds, and
    the speed that this leaves, by the largest; the seconds from a trainer's start to its first step, and those of its
    imports alone; and in the demo, the seconds from the last step to verified weights.
    """
    (folder / "timer").mkdir()
    (folder / "timer" / "sitecustomize.py").write_text(TIMER)
    snakemake = demo_command(folder)
    quietly([*snakemake, f"fitted/{RUN}"])
    training = job(folder, STEPS)
    turns = [by_turns(training, folder / f"round-{number}", folder / "timer") for number in range(ROUNDS)]
    speeds = [statistics.fmean(slow / quick for quick, slow in of_round) for of_round in turns]
    ours, bare = zip(*chain.from_iterable(turns), strict=True)
    added = [
        seconds_around(folder / f"round-{number}" / our_run.__name__)
        - seconds_around(folder / f"round-{number}" / bare_run.__name__)
        for number in range(ROUNDS)
    ]
    mean = statistics.fmean(speeds)
    half = STUDENT_T * statistics.stdev(speeds) / math.sqrt(ROUNDS)
    return {
        "bare_step_ms": round(1000 * statistics.median(bare), 1),
        "our_step_ms": round(1000 * statistics.median(ours), 1),
        "speed_relative_to_bare": f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})",
        "lower_bound_of_speed": round(mean - half, 3),
        "added_to_a_step_ms": f"{1000 * min(added):.2f} to {1000 * max(added):.2f}",
        "speed_by_what_is_added": round(1 - max(added) / statistics.median(ours), 3),
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
        image_max_tokens=64,
        dataloader_workers=0,
        dtype="float32",
    )
    rows = folder / "fitted" / RUN
    data = TrainingData(rows / "train.jsonl", rows / "val.jsonl", folder / "stores/pictures/fire", "digest", False)
    return Training(data, BaseModel(folder / "tiny-model", "qwen3_vl", "digest"), settings, "cpu", 1, DDP)


def by_turns(training: Training, place: Path, timer: Path) -> list[tuple[float, float]]:
    """Train both ways by turns in a new folder; return our and the bare trainer's seconds of a step in each turn."""
    place.mkdir()
    ours, bare = (started(way, training, place / way.__name__, timer) for way in (our_run, bare_run))
    try:
        for trainer in (ours, bare):  # both load, then each warms up alone
            await_steps(trainer, 1)
            trainer.pause()
        for trainer in (ours, bare):
            with trainer.at_work():
                await_steps(trainer, WARM_UP)
        return [(turn_of(ours), turn_of(bare)) for _ in range(TURNS)]
    finally:
        ours.end()
        bare.end()


@dataclass
class Trainer:
    """A training at work in `place`. process: the first of its processes."""

    process: BaseProcess
    place: Path

    def pause(self) -> None:
        """Stop all its processes."""
        for one in self._all():
            one.suspend()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let a paused trainer go on within the block."""
        for one in self._all():
            one.resume()
        try:
            yield
        finally:
            self.pause()

    def end(self) -> None:
        """Kill all its processes."""
        for one in self._all():
            one.kill()
        self.process.join()

    def _all(self) -> list[psutil.Process]:
        if not self.process.is_alive():
            return []
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


def started(way: Any, training: Training, place: Path, timer: Path) -> Trainer:
    """Start a training of one way in its own process."""
    process = multiprocessing.get_context("fork").Process(target=way, args=(training, place, timer))
    process.start()
    return Trainer(process, place)


def await_steps(trainer: Trainer, count: int) -> None:
    """Wait until a trainer has ended that many steps."""
    while len(ends_of_steps(trainer.place)) < count:
        if not trainer.process.is_alive():
            sys.exit(f"the training in {trainer.place} has ended")
        time.sleep(0.01)


def turn_of(trainer: Trainer) -> float:
    """Let a paused trainer train for SLICE seconds, alone on all cores; return its median seconds of a step."""
    begun = time.time()
    with trainer.at_work():
        time.sleep(SLICE)
    return step_times([end for end in ends_of_steps(trainer.place) if end >= begun][1:])


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
    env |= {"PYTHONPATH": f"{timer}{os.pathsep}{env['PYTHONPATH']}", "VLMFLOW_TEST_STEP_TIMES": str(place / "steps")}
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
    return {"PYTHONPATH": str(timer), "VLMFLOW_TEST_STEP_TIMES": str(place / "steps")}


def ends_of_steps(place: Path) -> list[float]:
    return [end for end, _ in noted_steps(place)]


def seconds_around(place: Path) -> float:
    """Return the median seconds of a step, after the warm-up, in which it waited for its rows and for callbacks."""
    return statistics.median(spent for _, spent in noted_steps(place)[WARM_UP:])


def noted_steps(place: Path) -> list[tuple[float, float]]:
    file = place / "steps"
    if not file.exists():
        return []
    return [(float(end), float(spent)) for end, spent in map(str.split, file.read_text().splitlines())]


def step_times(ends: list[float]) -> float:
    """Return the median seconds of a step."""
    return statistics.median(after - before for before, after in pairwise(ends))


def to_verified(snakemake: list[str], folder: Path) -> float:
    """Run the demo to its end; return the seconds from its last training step to its proof."""
    (folder / "demo").mkdir()
    env = os.environ | timed(folder / "demo", folder / "timer")
    subprocess.run([*snakemake, f"verified/{RUN}"], env=env, check=True, capture_output=True)
    report = json.loads((folder / "checkpoints" / RUN / "full" / "report.json").read_text())
    stamps = ends_of_steps(folder / "demo")
    steps = stamps[-report["world_size"] * (report["steps"] + 1) :]  # those of the full training, of all ranks
    last_step = sorted(steps)[-2 * report["world_size"]]  # transformers' last call is not a step
    return (folder / "verified" / RUN / "proof.json").stat().st_mtime - last_step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        print(json.dumps(bench_training(Path(scratch).resolve()), indent=1))
