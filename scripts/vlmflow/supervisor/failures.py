"""Explains why trainers failed, from their log and their run folder, and whether the training goes on.

After a fault that may not come again it resumes once from a checkpoint, and fails the next time. After a step that has
spoiled it, it does not go on: the message has that step and its rows.
"""

import json
import re
import shutil
import signal
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.messages import BAD_STEP, BadStep, Fault
from vlmflow.supervisor.progress import last_step
from vlmflow.supervisor.run_folder import NAME, RunFolder

ACCOUNT = "resumed.json"
"""The file of a run folder with a `Mark`."""


REMEDY = (
    "lower runs.NAME.train.max_length or runs.NAME.train.micro_batch_tokens (if that is null: per_device_batch_size), "
    "which restarts training at step 0"
)

OF_THE_MACHINE = re.compile(
    r"CUDA error|cuDNN|CUBLAS|NCCL|DistBackendError|DistNetworkError|Connection (?:closed|reset)|\[Errno (?:5|28|116)\]"
)
"""What an error says that a GPU, a link or a disk is to blame for (EIO, ENOSPC and ESTALE of the latter)."""

NO_CAUSE = re.compile(r"ChildFailedError")

NO_CAUSE_AFTER_A_SIGNAL = re.compile(r"ChildFailedError|Signal \d+ \(SIG\w+\) received|SignalException")
"""What torchrun says of any failure, and of trainers or of itself that a signal ended."""

FROM_ANOTHER = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError")
"""What a trainer says when another one has ended."""

LONGEST_LINE = 2_000
"""Characters of a line of the log that are searched."""

FULL_DISK = 16_000_000
"""Free bytes below which a disk counts as full: less than a real checkpoint needs."""

NAMED = 8
"""How many rows a message names."""


class ResumableError(VlmflowError):
    """The trainers ended because of a fault after which the training is resumed once.

    name: the fault, for messages. lasts: whether the same command without a resume fails again. otherwise: what else to
    do if it fails again. begins_again: whether it is resumed from step 0, too.
    """

    name: str
    lasts: bool
    otherwise: str
    begins_again: bool


class OutOfGpuMemoryError(ResumableError):
    """A GPU ran out of memory. Its fragments may be to blame, which a new process does not have."""

    name = "out of memory"
    lasts = True
    otherwise = "or take GPUs with more memory"
    begins_again = False


class HangError(ResumableError):
    """No rank gave a sign of life for too long."""

    name = "hang"
    lasts = False
    otherwise = "on another machine, if it may be this one's"
    begins_again = True


class Mark(msgspec.Struct, frozen=True):
    """A record in the run folder: why and after which step the trainers ended, and the checkpoint to resume from."""

    fault: str
    step: int
    checkpoint: int


def resume_once(folder: RunFolder, checkpoint: int | None, error: ResumableError) -> Mark:
    """Record in the run folder why the trainers ended; returns the record if the training may resume.

    checkpoint: the step of its newest complete checkpoint; None if there is none, or it must not resume.

    Raises VlmflowError, with advice, without a checkpoint, or if it was resumed from the same one before, after this
    fault or another one.
    """
    step = last_step(folder.progress)
    if checkpoint is None:
        error_type = VlmflowError if error.lasts else PassingError
        raise error_type(f"{error.cause} (after step {step})", error.next_step) from None
    file = folder.path / ACCOUNT
    before = read_account(file, Mark) if file.is_file() else None
    mark = Mark(error.name, step, checkpoint)
    write_account(file, mark)
    if before and before.checkpoint == checkpoint:
        other = f"{before.fault} " if before.fault != error.name else ""
        raise VlmflowError(
            f"{error.cause} (after step {step}; {other}after step {before.step} before, and resumed from step "
            f"{checkpoint} since)",
            f"{error.next_step}; {error.otherwise}: the same command resumes from step {checkpoint}",
        ) from None
    return mark


class TrainersDiedError(PassingError):
    """The trainers ended by an error of their own, or the kernel killed one: the same start may end better."""


class MachineFaultError(VlmflowError):
    """The machines are not what the training needs; its data and settings may be good."""


FAULTS: dict[str, tuple[str, type[VlmflowError]]] = {
    r"MaxLengthError: (.*)": (
        "raise runs.NAME.train.max_length, or lower runs.NAME.train.image_max_tokens",
        VlmflowError,
    ),
    r"((?:OutOfMemoryError|CUDA (?:error: )?out of memory|Cuda failure 2\b|\w+_STATUS_ALLOC_FAILED).*)": (
        REMEDY,
        OutOfGpuMemoryError,
    ),
    r"(Signal 9 \(SIGKILL\) received by PID \d+)": (
        "a trainer killed from outside usually ran out of main memory: look at the kernel's log (dmesg), raise the "
        "memory, or lower runs.NAME.train.dataloader_workers; the same command resumes from the newest checkpoint",
        TrainersDiedError,
    ),
    r"(?m)^(.*(?:Timed out waiting \d+ms|collective operation timeout).*)": (
        "a process waited half an hour for the others: look for a hang in the trainer's log",
        PassingError,
    ),
    r"(not really distributed: .*)": (
        "set runs.NAME.processes: 1, or unset WORLD_SIZE, RANK and MASTER_* where you start the workflow",
        MachineFaultError,
    ),
    r"(not the same GPUs on all nodes: .*)": (
        "select one product in the pod template gpu (docs/kubernetes.md, Several nodes): the slowest would hold up all",
        MachineFaultError,
    ),
    r"(strategy \S+ is not at work: .*)": (
        "train with another strategy: accelerate did not start this one on the run's device",
        MachineFaultError,
    ),
    r"(Target modules .* not found in the base model)": (
        "fix runs.NAME.train.lora.target_modules: a layer's name is part of its weights' names, such as q_proj",
        VlmflowError,
    ),
    r"(unrecognized arguments: .*|error: argument .*|remaining_argv: .*)": (
        "fix runs.NAME.train.swift_args in the configuration",
        VlmflowError,
    ),
    r"(?m)^(?:\[rank\d+\]: *)?(?:[\w.]*\.)?(\w*(?:Error|Exception): .*)": (
        "look at the end of the trainer's log; the same command resumes from the newest checkpoint",
        TrainersDiedError,
    ),
}
"""Patterns of failures in a trainer's log (ms-swift's and PyTorch's texts), the next step, and the error to raise."""


class LogTail:
    """The part of a trainers' log that counts: from its end now, to `end_here`."""

    def __init__(self, log: Path, begin: int | None = None) -> None:
        """begin: the first byte that counts, if it is another."""
        self.log = log
        self._begin = self._size() if begin is None else begin
        self._end: int | None = None

    def end_here(self) -> None:
        """Count nothing that is written from now on: trainers that we end say so, and it is no cause."""
        self._end = self._end or self._size()

    def text(self) -> str:
        """Return the part; a missing log has none."""
        return self.log.read_bytes()[self._begin : self._end].decode(errors="replace") if self.log.is_file() else ""

    def _size(self) -> int:
        return self.log.stat().st_size if self.log.is_file() else 0


def failure_of(code: int, logs: Sequence[LogTail], label: str, passed_on: Sequence[int] = ()) -> VlmflowError:
    """Return why the trainers failed: a full disk, the cause in their logs, or a signal.

    code: torchrun's exit code. logs: those of all nodes, this node's first. label: the stage and run. passed_on: the
    signals that they got through us. Those end a trainer that is not at work yet, which saves nothing.
    """
    trainer_log = logs[0].log
    if shutil.disk_usage(trainer_log.parent).free < FULL_DISK:
        # Checked first: on a full disk the log has no cause.
        return PassingError(
            f"{label}: no space left on the disk of {trainer_log.parent}",
            "free space on the disk of stores.runs; the same command resumes from the newest whole checkpoint",
        )
    texts = {tail.log: _lines(tail.text()) for tail in logs}
    no_cause = NO_CAUSE_AFTER_A_SIGNAL if passed_on else NO_CAUSE
    for pattern, (next_step, error) in FAULTS.items():
        causes = [
            (match.strip(), log)
            for log, text in texts.items()
            for match in re.findall(pattern, text)
            if not no_cause.search(match)
        ]
        if causes:
            first_hand = [cause for cause in causes if not FROM_ANOTHER.search(cause[0])]
            cause, log = (first_hand or causes)[-1]
            if error is TrainersDiedError and (passed_on or OF_THE_MACHINE.search(cause)):
                error = PassingError
            return error(f"{label}: {cause}", f"{next_step} ({log})")
    if passed_on:
        return PassingError(
            f"{label}: {signal.Signals(passed_on[0]).name} ended the trainers before they could save a checkpoint",
            f"run the same command again: it resumes from the newest whole checkpoint, if there is one ({trainer_log})",
        )
    by_somebody = -code in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    return (PassingError if by_somebody else TrainersDiedError)(
        f"{label}: the trainers ended with code {code}",
        f"look at {trainer_log}; a trainer killed from outside usually ran out of memory; "
        "the same command resumes from the newest checkpoint",
    )


def _lines(log: str) -> str:
    """Return a log with a line for each state of a progress bar, and no line longer than a message needs.

    Some patterns take quadratic time on a long line.
    """
    return "\n".join(line[:LONGEST_LINE] for line in re.split(r"[\r\n]+", log))


def refuse_bad_step(folder: RunFolder, train: Path, label: str) -> None:
    """Raise VlmflowError if a step has spoiled the training of a run folder.

    train: the rows that it trains on. label: the stage and run, for the message.
    """
    file = folder.path / BAD_STEP
    if not file.is_file():
        return
    bad = read_account(file, BadStep)
    steps = [int(path.name.partition("-")[2]) for path in folder.output.glob("*") if NAME.fullmatch(path.name)]
    spoiled = [f"checkpoint-{step}" for step in sorted(steps) if step >= bad.first]
    good = max((step for step in steps if step < bad.first), default=None)
    stage = folder.path.absolute().parent  # only full trainings have a command for rows
    shown = f" (vlmflow rows {stage.parent.name} --step {bad.step} shows them)" if stage.name == "full" else ""
    last_good = f"the last good checkpoint is that of step {good}" if good is not None else "no checkpoint is good"
    ids = ids_of(train, bad.rows)
    rows = ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")
    raise VlmflowError(
        f"{label}: step {bad.step}: {_in_words(bad)}; rows {rows}; {last_good} ({folder.output})",
        f"lower runs.NAME.train.learning_rate; or correct the rows{shown}, or leave them out, in "
        f"the raw file; both train from step 0. To train on unchanged, remove {' and '.join([str(file), *spoiled])}",
    )


def ids_of(train: Path, rows: list[int]) -> list[str]:
    """Return the ids of rows. train: their file. rows: their lines in it, ascending from 0."""
    with train.open("rb") as lines:
        chosen = set(rows)
        read = [line for number, line in enumerate(islice(lines, max(rows, default=-1) + 1)) if number in chosen]
    return [str(json.loads(line).get("id", f"line {row + 1}")) for row, line in zip(rows, read, strict=True)]


def _in_words(bad: BadStep) -> str:
    if bad.fault is Fault.EXPLODED:
        return f"{bad.fault}: {', '.join(bad.losses)} nats per token from step {bad.first} on"
    return f"{bad.fault} (loss {bad.losses[-1]})"
