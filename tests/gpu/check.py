"""The check itself: the device's peak, the sample, a random model, a training, the merge and both proofs of it."""

import gc
import importlib.metadata
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from gpu.batches import Batch, batches, sound_rows
from gpu.estimated import case_of_check, estimated
from gpu.plain_trainer import train_plainly
from gpu.random_model import REAL, SMALL, Shape, write_random_model
from gpu.trained import Trained
from gpu.work import FORMULA, measured_peak, now
from gpu.workflow_trainer import train_as_the_workflow
from vlmflow.config.run_settings import TrainSettings, VerifySettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk
from vlmflow.demo.sample import PICTURES, TRAIN_FILE, write_sample
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.states import trained_of
from vlmflow.estimate.work import model_flops
from vlmflow.fetch.model_files import list_files
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.verify_logits import verify_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.training.train import refuse_slow_torch

SEED = 42
TRAIN_ROWS, TEST_ROWS = 240, 48
PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Scale:
    """The amount of work.

    matmul: rows of the square matrices whose product gives the peak. steps: optimizer steps, of which the first
    `warm_up` are not measured. batch: rows per pass. passes: of one step. disk: bytes that the folder will contain.
    """

    shape: Shape
    matmul: int
    warm_up: int
    steps: int
    batch: int
    passes: int
    disk: int


FULL = Scale(
    REAL,
    matmul=8192,
    warm_up=5,
    steps=20,
    batch=32,
    passes=TrainSettings().gradient_accumulation_steps,
    disk=9_000_000_000,
)
QUICK = Scale(SMALL, matmul=512, warm_up=2, steps=6, batch=1, passes=4, disk=100_000_000)


def check(folder: Path, device: str, small: bool, trainer: str | None, batch: int | None) -> dict[str, Any]:
    """Run the check in an empty folder, and return its figures: bytes, seconds, operations, as JSON values.

    device: cuda or cpu. small: a tiny model. trainer: ms-swift, plain, or None for ms-swift if it is installed.
    batch: rows per pass; None for the scale's number.

    Raises VlmflowError if the device cannot do it, the loss does not fall, or a proof fails.
    """
    begun = now("cpu")
    refuse_slow_torch(torch.__version__)
    _require_device(device)
    trainer = _choose_trainer(trainer)
    scale = QUICK if small else FULL
    require_free_disk(folder, scale.disk, "two models and what a training leaves")
    disable_progress_bar()
    settings = TrainSettings(
        max_steps=scale.steps,
        checkpoint_steps=scale.steps,
        per_device_batch_size=batch or scale.batch,
        gradient_accumulation_steps=scale.passes,
        learning_rate=1e-3,  # a few steps must change the logits by more than bfloat16's rounding
        lr_scheduler="constant",
        warmup_ratio=0,
        dataloader_workers=0 if device == "cpu" else 4,
    )
    sample, base, merged = folder / "sample", folder / "base", folder / "merged"
    write_sample(sample, TRAIN_ROWS, TEST_ROWS, SEED)
    rows = sound_rows(sample)
    try:
        peak = measured_peak(device, scale.matmul)
        write_random_model(base, sample / TRAIN_FILE, scale.shape, device, SEED)
        prepared = batches(rows, sample, base, settings.per_device_batch_size)
        _free(device)
        trained = _train(trainer, base, rows, prepared, sample / PICTURES, settings, scale.warm_up, folder, device)
    except torch.OutOfMemoryError as error:
        raise VlmflowError(
            f"{device}: {settings.per_device_batch_size} rows per pass do not fit: {error}",
            "close what else computes there, or ask for fewer rows per pass with --batch",
        ) from None
    _require_learning(trained.losses)
    _free(device)
    return {
        "machine": _machine(device),
        "settings": settings.model_dump(mode="json"),
        **_speed(trained, prepared, base, settings, peak, scale),
        **_merge_and_verify(base, trained.adapter, merged, rows, sample / PICTURES, settings, device),
        "seconds": now("cpu") - begun,
    }


def _require_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise VlmflowError(
            f"PyTorch {torch.__version__} finds no GPU here",
            "run it on a machine with a GPU and a PyTorch for it; to try the check itself: --device cpu --small",
        )


def _choose_trainer(wanted: str | None) -> str:
    try:
        importlib.metadata.version("ms-swift")
    except importlib.metadata.PackageNotFoundError:
        if wanted == "ms-swift":
            raise VlmflowError("--trainer ms-swift: ms-swift is not installed", "take --trainer plain") from None
        return "plain"
    return wanted or "ms-swift"


def _train(
    trainer: str,
    base: Path,
    rows: Sequence[ShareGptRow],
    prepared: Sequence[Batch],
    pictures: Path,
    settings: TrainSettings,
    warm_up: int,
    folder: Path,
    device: str,
) -> Trained:
    if trainer == "plain":
        return train_plainly(base, prepared, settings, warm_up, folder / "adapter", device)
    return train_as_the_workflow(base, rows, pictures, settings, warm_up, folder / "runs", device, _cores())


def _require_learning(losses: Sequence[float]) -> None:
    quarter = max(1, len(losses) // 4)
    first, last = statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
    if not (math.isfinite(sum(losses)) and last < first):
        raise VlmflowError(
            f"the loss does not fall: {first:.3f} in the first {quarter} steps, {last:.3f} in the last",
            "look at this machine's PyTorch first: the same check on its CPU (--device cpu --small) must pass",
        )


def _speed(
    trained: Trained, prepared: Sequence[Batch], base: Path, settings: TrainSettings, peak: float, scale: Scale
) -> dict[str, Any]:
    sizes = [size for batch in prepared for size in batch.sizes]
    tokens = sum(size.tokens for size in sizes)
    case = case_of_check(base, sizes, settings)
    work, measured_steps = model_flops(case.shape, case.way), scale.steps - scale.warm_up
    # The steps go through all rows several times, so that the rows' mean is the steps' mean.
    flops_per_token = sum(work.of_row(size.tokens, size.trained, size.patches) for size in sizes) / tokens
    flops = flops_per_token * trained.tokens / trained.seconds
    return {
        "weights": {"total": weights_of(case.shape), "adapter": trained_of(case.shape, case.way)},
        "rows": {
            "rows": len(sizes),
            "tokens": tokens,
            "trained_tokens": sum(size.trained for size in sizes),
            "patches": sum(size.patches for size in sizes),
        },
        "training": {
            **{name: value for name, value in asdict(trained).items() if name != "adapter"},
            "measured_steps": measured_steps,
            "tokens_per_second": trained.tokens / trained.seconds,
            "positions_per_second": trained.positions and trained.positions / trained.seconds,
        },
        "peak": {
            "formula": FORMULA,
            "flops_per_token": flops_per_token,
            "flops_per_second": flops,
            "matmul_flops_per_second": peak,
            "share": flops / peak,
        },
        "estimate": estimated(case, trained, peak, measured_steps),
    }


def _merge_and_verify(
    base: Path,
    adapter: Path,
    merged: Path,
    rows: Sequence[ShareGptRow],
    pictures: Path,
    settings: TrainSettings,
    device: str,
) -> dict[str, Any]:
    files = list_files(base, "the random model").names
    start = now("cpu")
    merge_weights(base, adapter, merged, files, _cores())
    merging = now("cpu") - start
    start = now("cpu")
    tensors = verify_tensors(base, adapter, merged, files, _cores())
    comparing = now("cpu") - start
    start = now("cpu")
    compared = rows[: VerifySettings().rows]
    logits = verify_logits(base, adapter, merged, compared, pictures, device, settings.dtype, settings.image_max_tokens)
    answering = now("cpu") - start
    size = sum(path.stat().st_size for path in merged.rglob("*") if path.is_file())
    return {
        "merge": {"bytes": size, "seconds": merging, "bytes_per_second": size / merging},
        "tensors": {"seconds": comparing, **msgspec.to_builtins(tensors)},
        "logits": {"seconds": answering, **msgspec.to_builtins(logits)},
    }


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "memory": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "cores": _cores(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
