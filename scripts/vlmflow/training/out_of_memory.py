"""What is done when a GPU's memory does not suffice: a training is resumed from a checkpoint once, and then stopped."""

from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.training.events import read_event
from vlmflow.training.run_folder import RunFolder

REMEDY = "lower runs.NAME.train.max_length or runs.NAME.train.per_device_batch_size, which restarts training at step 0"


class OutOfGpuMemoryError(VlmflowError):
    """The trainers ended because a GPU had no memory left."""


class Mark(msgspec.Struct, frozen=True):
    """What the run folder remembers: after which step it happened last, and from which it was to be resumed then."""

    step: int
    checkpoint: int


def resume_once(folder: RunFolder, checkpoint: int | None, error: OutOfGpuMemoryError) -> Mark:
    """Decide on a training that ran out of GPU memory, and remember it in the run folder.

    checkpoint: the step of its newest whole checkpoint, from which it can be resumed; None for none, or where it is
    not to be.

    Raises the error, with advice, where there is none, or where it was resumed from the same one before.
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
    """Give the last step that the trainer told of; 0 where it told of none."""
    lines = progress.read_bytes().splitlines() if progress.is_file() else []
    return next((read_event(line).step for line in reversed(lines) if line.endswith(b"}")), 0)
