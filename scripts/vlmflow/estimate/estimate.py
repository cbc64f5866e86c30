"""The estimate of a run: memory, steps, times, prices and disk, and what would make it fit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vlmflow.config.gpus import GPUS, Gpu
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import refuse_other_rows
from vlmflow.core.errors import VlmflowError, log
from vlmflow.estimate.account import SHARE, Disk, Estimate, Needs, NoEstimate, OnProduct, Result
from vlmflow.estimate.changes import FITS, changes
from vlmflow.estimate.memory import assumed, base_bytes, memory, trained_of
from vlmflow.estimate.run import BF16, EstimateInput, RowLengths, inputs_of
from vlmflow.estimate.shape import UnknownModelError, read_shape, weights_of
from vlmflow.estimate.times import amount, comparison_seconds, times
from vlmflow.fetch.placed import read_small_files
from vlmflow.lengths.steps import AND_AGAIN, FEWEST_TOKENS, FIRST, FORWARD_AND_BACKWARD, NUMBERS

BEING_WRITTEN = 1
"""A new checkpoint is complete before an old one is removed."""


def estimate_of_run(train: Path, val: Path, summary: Path, model_files: Path, settings: PartOf[RunSettings]) -> Result:
    """Return the estimate of a run; NoEstimate if the estimate does not know its model's architecture.

    With `estimate: ignore` also NoEstimate if the model's config.json cannot be read, or has sizes that do not fit
    together.

    train, val, summary: the files of measure_lengths. model_files: the base model without its weights
    (model_files/MODEL). settings: those of the run.

    Raises VlmflowError if a file has changed, or config.json lacks a size or has a wrong one.
    """
    again = f"measure them again: snakemake --forcerun measure_lengths -- {summary}"
    refuse_other_rows(summary, [train, val], "lengths", again)
    lengths = RowLengths.read(train), RowLengths.read(val)
    try:
        shape = read_shape(read_small_files(model_files))
        return estimate(inputs_of(shape, settings, *lengths), settings.gpu, settings.gpu_hour_price)
    except VlmflowError as error:
        if not isinstance(error, UnknownModelError) and settings.estimate != "ignore":
            raise
        log.warning(f"no estimate: {error.cause}")
        return NoEstimate(error.cause)


def estimate(inputs: EstimateInput, gpu: str | None, price: float | None) -> Estimate:
    """Return the estimate of a run.

    gpu: the name of the product that it will train on (`config.gpus`), if known. price: of one GPU for an hour.
    """
    own = GPUS[gpu] if gpu and inputs.on_gpu else None
    passes = _needs_of(inputs) if inputs.on_gpu else []
    inputs = _as_begun(inputs, passes, own)
    work, needed = amount(inputs), memory(inputs)
    tokens = inputs.train.tokens
    return Estimate(
        gpu=gpu,
        nodes=inputs.mode.nodes,
        processes=inputs.mode.processes,
        weights=weights_of(inputs.shape),
        trained=trained_of(inputs.shape, inputs.mode),
        steps=work.steps,
        evaluations=work.evaluations,
        rows=len(inputs.train),
        tokens=work.tokens,
        flops=work.flops + work.evaluation_flops,
        longest=int(tokens.max()) if len(tokens) else 0,
        memory=needed,
        products=[
            _on(inputs, product, needed.total, price if product.name == gpu else None) for product in GPUS.values()
        ],
        disk=disk(inputs),
        micro_batch_tokens=inputs.micro_batch_tokens,
        gradient_checkpointing=inputs.mode.gradient_checkpointing,
        one_row_each=_one_row_each(inputs, own),
        passes=passes,
        notes=[note for note in (assumed(inputs.shape, inputs.mode),) if note],
        changes=changes(inputs, own) if own and len(tokens) and needed.total > FITS * own.memory else [],
    )


def _needs_of(inputs: EstimateInput) -> list[Needs]:
    """Return the memory of each number of tokens that the word `auto` may come to mean; [] if the run has numbers."""
    if inputs.settings.micro_batch_tokens != "auto":
        return []
    word = inputs.settings.gradient_checkpointing
    allowed = [True, False] if word == "auto" else [word]
    return [Needs(number, again, memory(_with(inputs, number, again)).total) for again in allowed for number in NUMBERS]


def _with(inputs: EstimateInput, number: int, again: bool) -> EstimateInput:
    return replace(inputs.with_settings(gradient_checkpointing=again), micro_batch_tokens=number)


def _as_begun(inputs: EstimateInput, needs: Sequence[Needs], gpu: Gpu | None) -> EstimateInput:
    """Return the run with its micro-batches.

    needs: see `_needs_of`. gpu: its product; without one, `auto` means FIRST tokens.
    """
    set_to = inputs.settings.micro_batch_tokens
    if not needs:
        return replace(inputs, micro_batch_tokens=set_to if isinstance(set_to, int) else None)
    if gpu is None:
        return _with(inputs, FIRST, needs[0].gradient_checkpointing)
    fitting = [need for need in needs if need.memory <= SHARE * gpu.memory] or needs[:1]
    runs = [_with(inputs, need.micro_batch_tokens, need.gradient_checkpointing) for need in fitting]
    return min(runs, key=lambda run: (_cost(run), run.micro_batch_tokens))


def _cost(inputs: EstimateInput) -> float:
    """Return what a step costs as the smoke run will compare it (`supervisor.smoke`), but of rows as they come."""
    rows = inputs.train
    tokens = rows.tokens[rows.grouped(_rows_of_step(inputs))].sum(axis=1) if len(rows) else np.zeros(1)
    counts = np.ceil(tokens / (inputs.micro_batch_tokens or 1))
    work = AND_AGAIN if inputs.mode.gradient_checkpointing else FORWARD_AND_BACKWARD
    return float((work * np.maximum(counts * FEWEST_TOKENS, tokens)).mean())


def _rows_of_step(inputs: EstimateInput) -> int:
    """Return the rows of a step on one GPU."""
    return inputs.settings.per_device_batch_size * inputs.settings.gradient_accumulation_steps


def _one_row_each(inputs: EstimateInput, gpu: Gpu | None) -> float | None:
    if gpu is None or inputs.micro_batch_tokens is None or not len(inputs.train):
        return None
    alone = inputs.with_settings(per_device_batch_size=1, gradient_accumulation_steps=_rows_of_step(inputs))
    alone = replace(alone, micro_batch_tokens=None)
    return round(times(alone, gpu, fast=False).seconds / times(inputs, gpu, fast=False).seconds, 2)


def _on(inputs: EstimateInput, gpu: Gpu, needed: int, price: float | None) -> OnProduct:
    fast, slow = times(inputs, gpu, fast=True), times(inputs, gpu, fast=False)
    hourly = None if price is None else price * inputs.mode.processes
    return OnProduct(
        gpu=gpu.name,
        memory_share=needed / gpu.memory,
        fast=fast,
        slow=slow,
        fast_price=None if hourly is None else hourly * fast.hours,
        slow_price=None if hourly is None else hourly * slow.hours,
        fast_comparison=comparison_seconds(inputs, gpu, fast=True),
        slow_comparison=comparison_seconds(inputs, gpu, fast=False),
    )


def disk(inputs: EstimateInput) -> Disk:
    """Return the bytes of the models and of the checkpoints; the models are in 16 bits, as they are published."""
    model = weights_of(inputs.shape) * BF16
    mode, trained = inputs.mode, trained_of(inputs.shape, inputs.mode)
    saved = base_bytes(inputs.shape, mode) if mode.is_full else trained * mode.trained_bytes
    # DeepSpeed's mp_rank_00_model_states.pt has them once more, unless they are sharded.
    again = saved if mode.strategy.engine == "deepspeed" and mode.shares("weights") == 1 else 0
    checkpoint = saved + again + trained * mode.optimizer_bytes
    return Disk(model, model, checkpoint, (inputs.settings.keep_checkpoints + BEING_WRITTEN) * checkpoint)
