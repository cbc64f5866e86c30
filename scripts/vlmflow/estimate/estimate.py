"""The estimate of a run: memory, steps, times, prices and disk, and what would make it fit."""

from dataclasses import replace

from vlmflow.config.gpus import GPUS, Gpu
from vlmflow.estimate.accounts import Estimate, OnProduct
from vlmflow.estimate.changes import FITS, changes
from vlmflow.estimate.disk import disk
from vlmflow.estimate.estimate_input import EstimateInput
from vlmflow.estimate.memory import memory
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.passes import as_begun, needs_of
from vlmflow.estimate.states import trained_of
from vlmflow.estimate.times import amount, comparison_seconds, times
from vlmflow.estimate.tower import assumed


def estimate(inputs: EstimateInput, gpu: str | None, price: float | None) -> Estimate:
    """Return the estimate of a run.

    gpu: the name of the product that it will train on (`config.gpus`), if known. price: of one GPU for an hour.
    """
    own = GPUS[gpu] if gpu and inputs.on_gpu else None
    passes = needs_of(inputs) if inputs.on_gpu else []
    inputs = as_begun(inputs, passes, own)
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
        products=[_on(inputs, one, needed.total, price if one.name == gpu else None) for one in GPUS.values()],
        disk=disk(inputs),
        micro_batch_tokens=inputs.micro_batch_tokens,
        gradient_checkpointing=inputs.mode.gradient_checkpointing,
        one_row_each=_one_row_each(inputs, own),
        passes=passes,
        notes=[note for note in (assumed(inputs.shape, inputs.mode),) if note],
        changes=changes(inputs, own) if own and len(tokens) and needed.total > FITS * own.memory else [],
    )


def _one_row_each(inputs: EstimateInput, gpu: Gpu | None) -> float | None:
    if gpu is None or inputs.micro_batch_tokens is None or not len(inputs.train):
        return None
    rows = inputs.settings.per_device_batch_size * inputs.settings.gradient_accumulation_steps
    alone = inputs.with_settings(per_device_batch_size=1, gradient_accumulation_steps=rows)
    alone = replace(alone, mode=inputs.mode, micro_batch_tokens=None)
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
