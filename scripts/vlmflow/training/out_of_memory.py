"""Handles a GPU that runs out of memory: the training resumes once from a checkpoint, and fails the next time."""

from contextlib import suppress
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.trainer.events import read_event
from vlmflow.training.run_folder import RunFolder

REMEDY = "lower runs.NAME.train.max_length or runs.NAME.train.per_device_batch_size, which restarts training at step 0"


class OutOfGpuMemoryError(VlmflowError):
    """The trainers ended because a GPU ran out of memory."""


class Mark(msgspec.Struct, frozen=True):
    """A record in the run folder: the step after which it happened last, and the checkpoint to resume from."""

    step: int
    checkpoint: int


def resume_once(folder: RunFolder, checkpoint: int | None, error: OutOfGpuMemoryError) -> Mark:
    """Record in the run folder that a training ran out of GPU memory; returns the record if it may resume.

    checkpoint: the step of its newest complete checkpoint; None if there is none, or it must not resume.

    Raises VlmflowError, with advice, without a checkpoint, or if it was resumed from the same one before.
    """
    step = last_step(folder.progress)
    if checkpoint is None:
        raise VlmflowError(f"{error.cause} (after step {step})", error.next_step) from None
    file = folder.path / "out_of_memory.json"
    before = read_account(file, Mark) if file.is_file() else None
    mark = Mark(step, checkpoint)
    write_account(file, mark)
    if before and before.checkpoint == checkpoint:
        raise VlmflowError(
            f"{error.cause} (after step {step}; after step {before.step} before, and resumed from step {checkpoint} "
            "since)",
            f"{error.next_step}; or take GPUs with more memory: the same command resumes from step {checkpoint}",
        ) from None
    return mark


def last_step(progress: Path) -> int:
    """Return the last step that the trainer reported, or 0."""
    for line in reversed(progress.read_bytes().splitlines() if progress.is_file() else []):
        with suppress(ValueError):  # a cut line, or one of another version: it must not hide why the training failed
            return read_event(line).step
    return 0
