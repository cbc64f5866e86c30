"""The estimate of a run: memory, steps, times, prices and disk, and what would make it fit."""

from dataclasses import replace

from vlmflow.config.gpus import GPUS, Gpu
from vlmflow.estimate.accounts import Estimate, OnProduct
from vlmflow.estimate.case import Case
from vlmflow.estimate.changes import FITS, changes
from vlmflow.estimate.disk import disk
from vlmflow.estimate.memory import memory
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.passes import as_begun, needs_of
from vlmflow.estimate.states import trained_of
from vlmflow.estimate.times import amount, comparison_seconds, times
from vlmflow.estimate.tower import assumed


def estimate(case: Case, gpu: str | None, price: float | None) -> Estimate:
    """Return the estimate of a run.

    gpu: the name of the product that it will train on (`config.gpus`), if known. price: of one GPU for an hour.
    """
    own = GPUS[gpu] if gpu and case.on_gpu else None
    passes = needs_of(case) if case.on_gpu else []
    case = as_begun(case, passes, own)
    work, needed = amount(case), memory(case)
    tokens = case.train.tokens
    return Estimate(
        gpu=gpu,
        nodes=case.way.nodes,
        processes=case.way.processes,
        weights=weights_of(case.shape),
        trained=trained_of(case.shape, case.way),
        steps=work.steps,
        evaluations=work.evaluations,
        rows=len(case.train),
        tokens=work.tokens,
        flops=work.flops + work.evaluation_flops,
        longest=int(tokens.max()) if len(tokens) else 0,
        memory=needed,
        products=[_on(case, one, needed.total, price if one.name == gpu else None) for one in GPUS.values()],
        disk=disk(case),
        micro_batch_tokens=case.micro_batch_tokens,
        gradient_checkpointing=case.way.gradient_checkpointing,
        one_row_each=_one_row_each(case, own),
        passes=passes,
        notes=[note for note in (assumed(case.shape, case.way),) if note],
        changes=changes(case, own) if own and len(tokens) and needed.total > FITS * own.memory else [],
    )


def _one_row_each(case: Case, gpu: Gpu | None) -> float | None:
    if gpu is None or case.micro_batch_tokens is None or not len(case.train):
        return None
    rows = case.settings.per_device_batch_size * case.settings.gradient_accumulation_steps
    alone = case.with_settings(per_device_batch_size=1, gradient_accumulation_steps=rows)
    alone = replace(alone, way=case.way, micro_batch_tokens=None)
    return round(times(alone, gpu, fast=False).seconds / times(case, gpu, fast=False).seconds, 2)


def _on(case: Case, gpu: Gpu, needed: int, price: float | None) -> OnProduct:
    fast, slow = times(case, gpu, fast=True), times(case, gpu, fast=False)
    hourly = None if price is None else price * case.way.processes
    return OnProduct(
        gpu=gpu.name,
        memory_share=needed / gpu.memory,
        fast=fast,
        slow=slow,
        fast_price=None if hourly is None else hourly * fast.hours,
        slow_price=None if hourly is None else hourly * slow.hours,
        fast_comparison=comparison_seconds(case, gpu, fast=True),
        slow_comparison=comparison_seconds(case, gpu, fast=False),
    )
