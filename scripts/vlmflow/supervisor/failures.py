"""Explains why trainers failed: from their log, and from what they left in the run folder."""

import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.supervisor.resumed import OutOfGpuMemoryError

REMEDY = (
    "lower runs.NAME.train.max_length or runs.NAME.train.micro_batch_tokens (if that is null: per_device_batch_size), "
    "which restarts training at step 0"
)


class TrainersDiedError(PassingError):
    """The trainers ended by an error of their own, or the kernel killed one: the same start may end better."""


class MachineFaultError(VlmflowError):
    """The machines are not what the training needs; its data and settings may be good."""


FAULTS = [
    (
        r"MaxLengthError: (.*)",
        "raise runs.NAME.train.max_length, or lower runs.NAME.train.image_max_tokens",
        VlmflowError,
    ),
    (
        r"((?:OutOfMemoryError|CUDA (?:error: )?out of memory|Cuda failure 2\b|\w+_STATUS_ALLOC_FAILED).*)",
        REMEDY,
        OutOfGpuMemoryError,
    ),
    (
        r"(Signal 9 \(SIGKILL\) received by PID \d+)",
        "a trainer killed from outside usually ran out of main memory: look at the kernel's log (dmesg), raise the "
        "memory, or lower runs.NAME.train.dataloader_workers; the same command resumes from the newest checkpoint",
        TrainersDiedError,
    ),
    (
        r"(?m)^(.*(?:Timed out waiting \d+ms|collective operation timeout).*)",
        "a process waited half an hour for the others: look for a hang in the trainer's log",
        PassingError,
    ),
    (
        r"(not really distributed: .*)",
        "set runs.NAME.processes: 1, or unset WORLD_SIZE, RANK and MASTER_* where you start the workflow",
        MachineFaultError,
    ),
    (
        r"(not the same GPUs on all nodes: .*)",
        "select one product in the pod template gpu (docs/kubernetes.md, Several nodes): the slowest would hold up all",
        MachineFaultError,
    ),
    (
        r"(strategy \S+ is not at work: .*)",
        "train with another strategy: accelerate did not start this one on the run's device",
        MachineFaultError,
    ),
    (
        r"(Target modules .* not found in the base model)",
        "fix runs.NAME.train.lora.target_modules: a layer's name is part of its weights' names, such as q_proj",
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
        TrainersDiedError,
    ),
]
"""Patterns of failures in a trainer's log (ms-swift's and PyTorch's texts), the next step, and the error to raise."""

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


class Said:
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


def failure_of(code: int, logs: Sequence[Said], what: str, passed_on: Sequence[int] = ()) -> VlmflowError:
    """Return why the trainers failed: a full disk, the cause in their logs, or a signal.

    code: torchrun's exit code. logs: those of all nodes, this node's first. what: the stage and run. passed_on: the
    signals that they got through us. Those end a trainer that is not at work yet, which saves nothing.
    """
    trainer_log = logs[0].log
    if shutil.disk_usage(trainer_log.parent).free < FULL_DISK:
        # Checked first: on a full disk the log has no cause.
        return PassingError(
            f"{what}: no space left on the disk of {trainer_log.parent}",
            "free space on the disk of stores.runs; the same command resumes from the newest whole checkpoint",
        )
    texts = {said.log: _lines(said.text()) for said in logs}
    no_cause = NO_CAUSE_AFTER_A_SIGNAL if passed_on else NO_CAUSE
    for pattern, next_step, kind in FAULTS:
        found = [
            (match.strip(), log)
            for log, text in texts.items()
            for match in re.findall(pattern, text)
            if not no_cause.search(match)
        ]
        if found:
            first_hand = [one for one in found if not FROM_ANOTHER.search(one[0])]
            cause, log = (first_hand or found)[-1]
            if kind is TrainersDiedError and (passed_on or OF_THE_MACHINE.search(cause)):
                kind = PassingError
            return kind(f"{what}: {cause}", f"{next_step} ({log})")
    if passed_on:
        return PassingError(
            f"{what}: {signal.Signals(passed_on[0]).name} ended the trainers before they could save a checkpoint",
            f"run the same command again: it resumes from the newest whole checkpoint, if there is one ({trainer_log})",
        )
    by_somebody = -code in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    return (PassingError if by_somebody else TrainersDiedError)(
        f"{what}: the trainers ended with code {code}",
        f"look at {trainer_log}; a trainer killed from outside usually ran out of memory; "
        "the same command resumes from the newest checkpoint",
    )


def _lines(log: str) -> str:
    """Return a log with a line for each state of a progress bar, and no line longer than a message needs.

    Some patterns take quadratic time on a long line.
    """
    return "\n".join(line[:LONGEST_LINE] for line in re.split(r"[\r\n]+", log))
