"""The shared memory through which loader processes pass pictures to a trainer."""

import shutil
from pathlib import Path

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)

BYTES_PER_IMAGE_TOKEN = 4 * 3 * 2 * 16 * 16 * 4
"""Qwen3-VL's processor: 4 patches per token, each of 3 channels, 2 frames and 16 x 16 pixels in float32."""

BATCHES_AHEAD = 2
"""Batches that each loader process of torch's DataLoader keeps ready (prefetch_factor)."""

LOADERS = 2
"""During an evaluation, the loader of the training rows keeps its batches too: ms-swift's loaders are persistent."""


def shared_memory_needed(settings: TrainSettings, processes: int, picture_tokens: int | None = None) -> int:
    """Return the bytes of all loaders' batches.

    picture_tokens: the most in a batch; None if every row may have a picture of the largest size.
    """
    largest = settings.per_device_batch_size * settings.image_max_tokens
    batch = (largest if picture_tokens is None else picture_tokens) * BYTES_PER_IMAGE_TOKEN
    return processes * LOADERS * settings.dataloader_workers * BATCHES_AHEAD * batch


def refuse_small_shared_memory(
    settings: TrainSettings, processes: int, picture_tokens: int | None = None, folder: Path = SHARED_MEMORY
) -> None:
    """Refuse to train if the loaders' batches do not fit: the trainer would die of a bus error during the run.

    Containers have 64 MB by default. picture_tokens: see `shared_memory_needed`. folder: the mount
    point of the shared memory. Raises VlmflowError.
    """
    needed, free = shared_memory_needed(settings, processes, picture_tokens), shutil.disk_usage(folder).free
    if needed > free:
        raise VlmflowError(
            f"{folder} has {free / 1e6:,.0f} MB free, but the data loaders of {processes} process(es) need "
            f"{needed / 1e6:,.0f}",
            "give the container more shared memory (docker run --shm-size; in a pod, a memory-backed volume), or set "
            "train.dataloader_workers to 0",
        )
