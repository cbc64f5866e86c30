"""Starts the trainers with torchrun, and watches them."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from vlmflow.training.failures import failure_of
from vlmflow.training.hangs import HangWatch, end_hang
from vlmflow.training.newest import Newest, report_line
from vlmflow.training.onlooker import Onlooker, nobody
from vlmflow.training.resumed import ResumableError
from vlmflow.training.run_folder import RunFolder

log = logging.getLogger("vlmflow")


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

    After SIGTERM or SIGINT (Ctrl-C) to this process the trainers save a checkpoint and end; while they still load, they
    end at once.
    Raises VlmflowError with the cause if they fail; HangError after they were ended because they hang.
    """
    folder.output.mkdir(exist_ok=True)
    hangs = HangWatch(folder.path, training.processes, training.settings.hang_minutes)
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
        error: VlmflowError | None = None
        with _signals_passed_on(trainers) as passed_on:
            try:
                silent = _watch(trainers, hangs, folder, seen, what, onlooker)
                if silent is not None:
                    error = end_hang(hangs, trainers, folder.trainer_log, silent, what)
            finally:
                onlooker(folder, False)
    if error is None and trainers.returncode:
        error = failure_of(trainers.returncode, folder.trainer_log, said, what, passed_on)
    if isinstance(error, ResumableError) and passed_on:  # who wants them to end does not want them to resume
        error = PassingError(error.cause, error.next_step)
    if error is not None:
        raise error


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
    # Rows of all lengths leave gaps in the GPU's memory that segments of fixed size cannot use.
    allocator = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
    ours = allocator | {"PATH": search_path()}
    return child_process.environment(pictures, image_max_tokens, folder.path / "cache", cores) | ours


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
def _signals_passed_on(trainers: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass SIGTERM and Ctrl-C to torchrun's children, which save and end; torchrun would kill them after 30 s.

    Yields a list of the signals that were passed on. A second Ctrl-C ends at once.
    """
    passed_on: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        passed_on.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(psutil.NoSuchProcess):  # they have just ended
            workers = psutil.Process(trainers.pid).children()
            name = signal.Signals(number).name
            log.info(f"{name}: {len(workers)} trainer(s) save a checkpoint and end; those that still load end at once")
            for process in workers or [trainers]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    trainers: subprocess.Popen[bytes], hangs: HangWatch, folder: RunFolder, seen: int, what: str, onlooker: Onlooker
) -> float | None:
    """Print the trainers' progress from the folder's progress file, from byte `seen` on, until they end or hang.

    Returns the minutes without a sign of life if they hang.
    """
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
                return None
            if (silent := hangs.silent_for()) is not None:
                return silent
            onlooker(folder, True)
            time.sleep(0.2)
