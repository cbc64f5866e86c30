"""What a training's supervisor and its trainers tell each other.

Orders are one JSON word of a trainer's command line: what the workflow wants besides ms-swift's arguments.

Events are the lines of `progress.jsonl` in the run folder. step: optimizer steps done. target: those of the whole run.
tokens: those trained on since step 0, without padding. The log is transformers' `log_history` (trainer_callback.py,
`TrainerState`), which is in each checkpoint.

Of a step that spoils a training, `bad_step.json` in the run folder has an account. What a checkpoint holds besides
ms-swift's files proves that it is undamaged, and that the published folder answers as the model did in the trainer.

Which rows were in which step stands in one text file per rank. A line is an optimizer step: its number, then for each
forward pass the rows, by their lines in the train file from 0.

    17 403,88 12,5        step 17 of two forward passes, with two rows each

A line is written before the step is trained, so a step that fails has one. A step that was trained again after a resume
has several; the last one counts. A last line without its end was cut by a kill, and does not count.

Signs of life: a rank touches its file before each forward pass, of training and of evaluation. The file's content is
what the rank is doing, since some of that may take longer (`Doing`). On SIGUSR1 a rank writes the stacks of all its
threads into a file of its own, also while it is stuck in compiled code (Python's faulthandler).
"""

import errno
import faulthandler
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.errors import VlmflowError
from vlmflow.core.patience import RunningTime
from vlmflow.swift.model_layers import Layers

PROGRESS = "progress.jsonl"
"""The file of a run folder with the trainer's events."""


BAD_STEP = "bad_step.json"
"""The file of a run folder with a `BadStep`. The same training is not started again: it would come to the same step."""

DIGESTS = "digests.json"
"""The file of a checkpoint with the digests of others, a `SavedDigests`."""

TRAINED = "trained.json"
"""The file of a checkpoint without an adapter that names the trained tensors, a `TrainedTensors`."""

LOGITS = "logits.safetensors"
"""The file of such a checkpoint with some rows of the val split as the trainer fed them to the model, and the model's
logits there.

Tensors by name: `row.N.NAME`, an input of row N as the model's `forward` takes it; `row.N.logits`, positions by
vocabulary in float32.
"""

POSITIONS = 16
"""The last positions of a row whose logits are stored; they depend on everything before them."""

StepLoss = tuple[int, float]
"""An optimizer step, and the loss there in nats per token."""

STATE = "trainer_state.json"
"""The file of a checkpoint that holds the log."""

ROWS_OF_STEPS = "rows_of_steps"
"""The folder in a run folder with a file per rank that says which rows were in which step."""

Batch = list[int]
"""The rows of one forward pass on one rank, by their lines in the train file from 0."""

LINE = re.compile(rb"(\d+)((?: \d+(?:,\d+)*)*)")

FOLDER = "heartbeats"
"""The folder of a run folder with a file for each rank, its sign of life."""

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of faulthandler's output: file, line and function."""


class MicroBatches(msgspec.Struct, frozen=True):
    """How steps are cut into micro-batches (`lengths.steps`).

    tokens: the most in one. rows_per_step: of all processes. seed: of the rows' order. padded: whether its rows are
    filled up to the longest. train, val: the absolute paths of the splits' lengths files.
    """

    tokens: int
    rows_per_step: int
    seed: int
    padded: bool
    train: str
    val: str


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The orders.

    folder: the absolute path of the run folder. starter: the process that starts torchrun. processes: the number of
    trainers. batches_per_step: of each trainer, where micro_batches is null. tuner, strategy: their names in `config`.
    group_by_length: the absolute path of the train split's lengths file, where rows of a batch are of similar length.
    early_stop_after: evaluations in a row without a lower loss after which the training ends; null: never. stop_at: the
    step after whose evaluation the training ends; null: the last one. seconds: how long this process may run before it
    saves a checkpoint and ends, after at least one step; null: without a limit. One in which it was stopped itself does
    not count.
    """

    folder: str
    starter: int
    processes: int
    batches_per_step: int
    tuner: str
    strategy: str
    early_stop_after: int | None
    micro_batches: MicroBatches | None = None
    group_by_length: str | None = None
    stop_at: int | None = None
    seconds: float | None = None

    def as_word(self) -> str:
        """Return the orders as one word of a command line."""
        return msgspec.json.encode(self).decode()


def read_orders(word: str) -> Orders:
    """Parse the orders; raises VlmflowError if the word has another form."""
    try:
        return msgspec.json.decode(word, type=Orders)
    except msgspec.DecodeError as error:
        raise VlmflowError(f"{word!r:.100}: {error}", "start trainers by the workflow's rules") from None


class Begin(msgspec.Struct, frozen=True, tag_field="event", tag="begin"):
    """A session begins. world_size: parallel trainers. parallel_mode: as in transformers. device: its name.

    at: when, in seconds since 1970, by rank 0's clock; missing in older files.
    """

    step: int
    target: int
    tokens: int
    world_size: int
    parallel_mode: str
    device: str
    at: float | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, tag_field="event", tag="model"):
    """The model of the session that just began. layers: of all kinds."""

    step: int
    layers: list[Layers]


class Log(msgspec.Struct, frozen=True, tag_field="event", tag="log"):
    """A step or an evaluation is done. time: seconds since the session began. Losses are in nats per token.

    Of rank 0, and missing in older files: waited: seconds of this session in which it waited for its next batch.
    memory: the most bytes so far, on the GPU, or on a machine without one in all.
    """

    time: float
    step: int
    target: int
    tokens: int
    loss: float | UnsetType = UNSET
    eval_loss: float | UnsetType = UNSET
    learning_rate: float | UnsetType = UNSET
    grad_norm: float | UnsetType = UNSET
    epoch: float | UnsetType = UNSET
    waited: float | UnsetType = UNSET
    memory: int | UnsetType = UNSET


class End(msgspec.Struct, frozen=True, tag_field="event", tag="end"):
    """A session ended by itself. peak_memory: bytes per process."""

    step: int
    peak_memory: list[int]


Event = Begin | Model | Log | End


def as_line(event: Event) -> str:
    """Format an event as a line. A loss that is not a number becomes NaN; msgspec's own JSON would write null."""
    return json.dumps(msgspec.to_builtins(event)) + "\n"


def read_event(line: bytes) -> Event:
    """Parse a line of UTF-8; raises ValueError if it is not an event."""
    try:
        return msgspec.convert(json.loads(line.decode()), Event)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def new_events(lines: IO[bytes]) -> Iterator[Event]:
    """Yield the events of complete lines that were written since the last call with the same open progress file.

    A line that is not an event is left out, so that it ends no training; `read_events` names it.
    """
    while (line := lines.readline()).endswith(b"\n"):
        with suppress(ValueError):
            yield read_event(line)
    lines.seek(-len(line), os.SEEK_CUR)


def read_events(progress: Path) -> list[Event]:
    """Read a progress file; a last line without its end is left out, since a full disk or a kill cut it.

    A missing file has none. Raises VlmflowError with the first line that is not an event.
    """
    events = []
    *lines, _ = progress.read_bytes().split(b"\n") if progress.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            events.append(read_event(line))
        except ValueError as error:
            raise VlmflowError(
                f"{progress}, line {number}: {error}",
                f"remove line {number} of {progress} and run the same command again: the line's figures are lost, and "
                "nothing of the training",
            ) from None
    return events


class Fault(StrEnum):
    """What is wrong with a step."""

    LOSS = "the loss is not a finite number"
    GRADIENT = "the gradient's norm is not a finite number"
    EXPLODED = "the loss has exploded"


class BadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that stopped a training.

    first: the step at which it began; with an exploded loss, the first of those that are too high. losses: of the steps
    from there on, in nats per token, as texts, since JSON has no NaN. rows: of the step, by their lines in the train
    file, from 0; with a loss that is no number, only those of the forward passes that gave it.
    """

    step: int
    first: int
    fault: Fault
    losses: list[str]
    rows: list[int]


class SavedDigests(msgspec.Struct, frozen=True):
    """The digests of a checkpoint's files when they were saved, by their paths in its folder.

    sha256: of the bytes of those that may be released. records: `core.files.records_digest` of those that torch.save
    wrote: optimizer, scheduler, random numbers, and what the strategy adds; none in earlier versions' checkpoints.
    """

    sha256: dict[str, str]
    records: dict[str, str] = {}


class TrainedTensors(msgspec.Struct, frozen=True):
    """The names of the trained tensors, as in the checkpoint's safetensors files."""

    tensors: list[str]


def logged(history: list[dict[str, Any]], name: str) -> list[StepLoss]:
    """Return the losses in a trainer's log. name: "loss" for training, "eval_loss" for validation.

    An entry whose step or loss is missing or no number counts as not logged: a resumed training evaluates again.
    """
    return [
        (entry["step"], entry[name])
        for entry in history
        if isinstance(entry.get("step"), Integral) and isinstance(entry.get(name), Real)
    ]


def evaluated(history: list[dict[str, Any]], step: int) -> bool:
    """Return whether a trainer's log has the validation loss of a step."""
    return any(at == step for at, _ in logged(history, "eval_loss"))


def stalled(history: list[dict[str, Any]], early_stop_after: int | None) -> bool:
    """Return whether the last `early_stop_after` evaluations in a trainer's log gave no new lowest validation loss.

    The log is part of each checkpoint, so a resumed training continues the count. NaN does not count as lower.
    """
    lowest, since = math.inf, 0
    for _, loss in logged(history, "eval_loss"):
        lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
    return early_stop_after is not None and since >= early_stop_after


class RowLog:
    """Writes the file of one rank."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        """Continue the file; an incomplete last line is removed."""
        file = run_folder / ROWS_OF_STEPS / f"rank-{rank}.txt"
        file.parent.mkdir(exist_ok=True)
        self._file = file.open("a+b", buffering=0)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, step: int, batches: list[Batch]) -> None:
        """Record the rows of a step that is trained now."""
        line = " ".join([str(step), *(",".join(map(str, batch)) for batch in batches)]).encode() + b"\n"
        if self._file.write(line) < len(line):  # the next line would continue this one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def rows_of_step(run_folder: Path, step: int) -> dict[int, list[Batch]]:
    """Return the batches of a step by rank, in the order of the forward passes; none if no rank reached it.

    Lines of another form are skipped: they are of no step.
    """
    files = {int(file.stem.rpartition("-")[2]): file for file in (run_folder / ROWS_OF_STEPS).glob("rank-*.txt")}
    begin = f"{step} ".encode()
    rows = {}
    for rank, file in sorted(files.items()):
        lines = [line for line in file.read_bytes().split(b"\n")[:-1] if line.startswith(begin)]
        if whole := [line.decode() for line in lines if LINE.fullmatch(line)]:
            rows[rank] = [[int(row) for row in batch.split(",")] for batch in whole[-1].split()[1:]]
    return rows


def last_step_begun(run_folder: Path) -> int:
    """Return the last step that began, or 0."""
    steps = [
        int(line.partition(b" ")[0])
        for file in (run_folder / ROWS_OF_STEPS).glob("rank-*.txt")
        for line in file.read_bytes().split(b"\n")[-2:-1]
        if LINE.fullmatch(line)
    ]
    return max(steps, default=0)


class Doing(StrEnum):
    """What a rank is doing. starting: until the first forward pass. saving: a checkpoint, or its end."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"


def beats_of(run_folder: Path, rank: int) -> Path:
    """Return the file that a rank touches."""
    return run_folder / FOLDER / f"rank-{rank}"


def stacks_of(run_folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks."""
    return run_folder / FOLDER / f"rank-{rank}.stacks"


class Heart:
    """The signs of life of this process, which is a rank of a training. rank: its number."""

    def __init__(self, run_folder: Path, rank: int, seconds: float | None = None) -> None:
        """Begin with `Doing.STARTING`, and write the stacks on SIGUSR1 from now on. seconds: how long it may run."""
        self.rank = rank
        self._most = math.inf if seconds is None else seconds
        self._running = None if seconds is None else RunningTime()
        self._file = beats_of(run_folder, rank)
        self._file.parent.mkdir(exist_ok=True)
        self._doing: Doing | None = None
        self._stacks = stacks_of(run_folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self.beat(Doing.STARTING)

    @property
    def is_over(self) -> bool:
        """Whether this process has run for its seconds."""
        return self._running is not None and self._running.seconds() > self._most

    def beat(self, doing: Doing) -> None:
        """Say that this process is alive, and what it is doing."""
        if doing is self._doing:
            return os.utime(self._file)
        self._doing = doing
        self._file.write_text(doing)


def innermost_frames(stacks: str, count: int) -> list[str]:
    """Return where a rank was, innermost first, from its stacks: "function (file:line)".

    The main thread answers the signal, so it is the one that faulthandler calls current; "" has no frames.
    """
    _, current, after = stacks.rpartition("Current thread")
    thread = after.partition("\n\n")[0] if current else stacks.rpartition("\n\n")[2]
    return [
        f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})"
        for file, line, function in FRAME.findall(thread)[:count]
    ]
