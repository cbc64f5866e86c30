"""Resumes a training once from a checkpoint after a fault that may not come again, and fails the next time."""

from contextlib import suppress
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.events import read_event
from vlmflow.supervisor.run_folder import RunFolder

ACCOUNT = "resumed.json"
"""The file of a run folder with a `Mark`."""


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
        kind = VlmflowError if error.lasts else PassingError
        raise kind(f"{error.cause} (after step {step})", error.next_step) from None
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


def last_step(progress: Path) -> int:
    """Return the last step that the trainer reported, or 0."""
    for line in reversed(progress.read_bytes().splitlines() if progress.is_file() else []):
        with suppress(ValueError):  # a cut line, or one of another version: it must not hide why the training failed
            return read_event(line).step
    return 0
