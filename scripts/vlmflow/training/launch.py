"""Starts the trainers with torchrun, watches them, and explains why they failed."""

import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.process import bound_to_this_process
from vlmflow.core.progress import LOG_INTERVAL, TERMINAL_INTERVAL
from vlmflow.swift import child_process
from vlmflow.swift.arguments import Training
from vlmflow.trainer import process as trainer
from vlmflow.trainer.events import Model, new_events
from vlmflow.trainer.model_layers import what_is_trained
from vlmflow.trainer.orders import Orders
from vlmflow.training.compiler import search_path
from vlmflow.training.newest import Newest, report_line
from vlmflow.training.onlooker import Onlooker, nobody
from vlmflow.training.out_of_memory import REMEDY, OutOfGpuMemoryError
from vlmflow.training.run_folder import RunFolder

log = logging.getLogger("vlmflow")

FAULTS = [
    (
        r"MaxLengthError: (.*)",
        "raise runs.NAME.train.max_length, or lower runs.NAME.train.image_max_tokens",
        VlmflowError,
    ),
    (r"((?:OutOfMemoryError|CUDA out of memory).*)", REMEDY, OutOfGpuMemoryError),
    (
        r"(.*(?:Timed out waiting \d+ms|collective operation timeout).*)",
        "a process waited half an hour for the others: look for a hang in the trainer's log; if ms-swift reads all "
        "rows first (packing, group_by_length), set runs.NAME.cached_dataset: true",
        PassingError,
    ),
    (
        r"(not really distributed: .*)",
        "set runs.NAME.processes: 1, or unset WORLD_SIZE, RANK and MASTER_* where you start the workflow",
        VlmflowError,
    ),
    (
        r"(strategy \S+ is not at work: .*)",
        "train with another strategy: accelerate did not start this one on the run's device",
        VlmflowError,
    ),
    (
        r"(unrecognized arguments: .*|error: argument .*|remaining_argv: .*)",
        "fix runs.NAME.train.swift_args in the configuration",
        VlmflowError,
    ),
    (
        r"(?m)^(?:\[rank\d+\]: *)?(?:[\w.]*\.)?(\w*(?:Error|Exception): .*)",
        "look at the end of the trainer's log; the same command resumes from the newest checkpoint",
        PassingError,  # it may also be a failing GPU or link
    ),
]
"""Patterns of failures in a trainer's log (ms-swift's and PyTorch's texts), the next step, and the error to raise."""

FULL_DISK = 16_000_000
"""Free bytes below which a disk counts as full: less than a real checkpoint needs."""


def launch(
    training: Training,
    folder: RunFolder,
    resume: Path | None,
    lock: int,
    threads: int,
    what: str,
    onlooker: Onlooker = nobody,
) -> None:
    """Train in `folder` until the trainers end, with progress on the console.

    resume: the checkpoint to resume from. lock: the run folder's lock, which the trainers hold as long as they run.
    threads: cores for all processes together. what: the stage and run, for messages. onlooker: see `onlooker`.

    After SIGTERM or SIGINT (Ctrl-C) to this process the trainers save a checkpoint and end.
    Raises VlmflowError with the cause if they fail.
    """
    folder.output.mkdir(exist_ok=True)
    seen = end_of_whole_lines(folder.progress)
    with folder.trainer_log.open("ab") as output:
        said = output.tell()
        trainers = subprocess.Popen(
            command(training, folder, resume),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(training, folder, threads),
            cwd=folder.path,  # ms-swift searches for a picture in the working directory first
            pass_fds=[lock],
            start_new_session=True,  # signals to our group must not reach torchrun: it grants 30 s and kills
            preexec_fn=bound_to_this_process(signal.SIGTERM),
        )
        with _signals_passed_on(trainers):
            try:
                _watch(trainers, folder, seen, what, onlooker)
            finally:
                onlooker(folder, False)
    if trainers.returncode:
        raise _failure(trainers.returncode, folder.trainer_log, said, what)


def command(training: Training, folder: RunFolder, resume: Path | None) -> list[str]:
    """Return the torchrun command line of a training."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={training.processes}"]
    orders = Orders(
        folder=str(folder.path.absolute()),
        processes=training.processes,
        tuner=training.tuner.name,
        strategy=training.strategy.name,
        early_stop_after=training.settings.early_stop_after,
    )
    worker = ["-m", trainer.__name__, orders.as_word()]
    rows = {"dataset": training.data.train, "val_dataset": training.data.val}
    if training.cached:
        rows = {"cached_dataset": training.cached / "train", "cached_val_dataset": training.cached / "val"}
    paths = {
        "model": training.model.folder,
        **rows,
        "output_dir": folder.output,
        **({"resume_from_checkpoint": resume} if resume else {}),
    }
    places = [word for name, path in paths.items() for word in (f"--{name}", str(path.absolute()))]
    return [sys.executable, *torchrun, *worker, *places, *training.arguments()]


def environment(training: Training, folder: RunFolder, threads: int) -> dict[str, str]:
    """Return the trainers' environment: ms-swift's, with its caches in the run folder and an equal share of cores."""
    cores = max(1, threads // training.processes)
    pictures, image_max_tokens = training.data.pictures, training.settings.image_max_tokens
    return child_process.environment(pictures, image_max_tokens, folder.path / "cache", cores) | {"PATH": search_path()}


def end_of_whole_lines(progress: Path) -> int:
    """Remove an incomplete last line of the progress file, which a full disk leaves, and return the file's size."""
    with progress.open("a+b") as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
    return whole


@contextmanager
def _signals_passed_on(trainers: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM and Ctrl-C to torchrun's children, which save and end; torchrun would kill them after 30 s.

    A second Ctrl-C ends at once.
    """

    def pass_on(number: int, frame: Any) -> None:
        workers = psutil.Process(trainers.pid).children()
        log.info(f"{signal.Signals(number).name}: {len(workers)} trainer(s) save a checkpoint and end")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for process in workers or [trainers]:
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(trainers: subprocess.Popen[bytes], folder: RunFolder, seen: int, what: str, onlooker: Onlooker) -> None:
    """Print the trainers' progress from the folder's progress file, starting at byte `seen`, until they end."""
    interval = TERMINAL_INTERVAL if sys.stderr.isatty() else LOG_INTERVAL
    shown_at, shown = -interval, ""
    newest = Newest()
    with folder.progress.open("rb") as lines:
        lines.seek(seen)
        while True:
            ended = trainers.poll() is not None
            for event in new_events(lines):
                newest.take(event)
                if isinstance(event, Model):
                    log.info(f"{what}: {what_is_trained(event.layers)}")
            line = report_line(newest)
            if line != shown and (ended or time.monotonic() - shown_at >= interval):
                shown_at, shown = time.monotonic(), line
                print(f"{what}: {line}", file=sys.stderr, flush=True)
            if ended:
                return
            onlooker(folder, True)
            time.sleep(0.2)


def _failure(code: int, trainer_log: Path, begin: int, what: str) -> VlmflowError:
    """Return why the trainers failed: a full disk, or the cause in their log from byte `begin` on."""
    if shutil.disk_usage(trainer_log.parent).free < FULL_DISK:
        # Checked first: on a full disk the log has no cause.
        return PassingError(
            f"{what}: no space left on the disk of {trainer_log.parent}",
            "free space on the disk of stores.runs; the same command resumes from the newest whole checkpoint",
        )
    text = trainer_log.read_bytes()[begin:].decode(errors="replace")
    for pattern, next_step, kind in FAULTS:
        found = [match for match in re.findall(pattern, text) if "ChildFailedError" not in match]
        if found:
            return kind(f"{what}: {found[-1].strip()}", f"{next_step} ({trainer_log})")
    return PassingError(
        f"{what}: the trainers ended with code {code}",
        f"look at {trainer_log}; a trainer killed from outside usually ran out of memory; "
        "the same command resumes from the newest checkpoint",
    )
