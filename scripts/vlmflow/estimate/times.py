"""How long a training takes on a GPU product, from its operations and the GPU's rates; nothing is measured.

A batch takes a + b · tokens. b: its operations at a share of the GPU's peak. a: what does not depend on its tokens: the
kernels that are started one by one, or reading all weights, whichever takes longer; and the weights that other GPUs
hold, which come over the link between them, or over the network between nodes, for each forward and each backward pass
(`overlap_comm: false`).
"""

from dataclasses import dataclass

from vlmflow.config.gpus import Gpu
from vlmflow.estimate.accounts import Times
from vlmflow.estimate.case import Case
from vlmflow.estimate.states import base_bytes, quantised_weights, states, trained_of
from vlmflow.estimate.way import Way
from vlmflow.estimate.work import forward, training
from vlmflow.training.steps import Steps, evaluations_of, side_by_side

LOW, HIGH = 0.2, 0.4
"""Shares of the dense peak that such trainings reach, low and high, on one machine. Assumptions, not measured here; for
large models PaLM's paper (arXiv:2204.02311, table 3) lists 0.21 to 0.46."""

KERNEL_SECONDS = 8e-6
"""Seconds that eager PyTorch needs to start a kernel. An assumption, not measured."""

RESTORED_BYTES = 4.5
"""Bytes that restoring a weight from 4 bits moves: it is read, written in 16 bits, and read again as such."""

KERNELS, ADAPTER_KERNELS = 45, 60
"""Kernels of a layer's forward pass, and those that adapters add."""


PASSES = 16
"""Forward passes that the rule `evaluate` makes for a row, at most: eight with each model, of a right and a wrong
answer in four contexts (`evaluation.passes`)."""


@dataclass(frozen=True)
class Amount:
    """How much work a run is.

    steps: optimizer steps. evaluations: on val. batches: of one GPU in a step. tokens: of the whole training.
    flops, evaluation_flops: of training and of all evaluations. evaluation_batches: of one GPU, in all evaluations.
    """

    steps: int
    evaluations: int
    batches: int
    tokens: int
    flops: float
    evaluation_flops: float
    evaluation_batches: int


def amount(case: Case) -> Amount:
    """Return how much work a run is; all zero without rows."""
    settings, processes = case.settings, case.way.processes
    if not len(case.train):
        return Amount(0, 0, 0, 0, 0.0, 0.0, 0)
    count = Steps.of(len(case.train), settings, processes)
    passes = count.total / count.per_epoch * count.rows / len(case.train)
    evaluations = evaluations_of(count.total, settings)
    batches_of_val = -(-len(case.val) // (side_by_side(settings, processes) * settings.per_device_batch_size))
    return Amount(
        steps=count.total,
        evaluations=evaluations,
        batches=settings.gradient_accumulation_steps,
        tokens=round(passes * int(case.train.tokens.sum())),
        flops=passes * training(case.shape, case.way).of(case.train),
        evaluation_flops=evaluations * forward(case.shape, case.way).of(case.val),
        evaluation_batches=evaluations * batches_of_val,
    )


def comparison_seconds(case: Case, gpu: Gpu, share: float) -> float:
    """Return how long the rule `evaluate` takes at a share of a product's peak, without loading the models.

    At most: each row has scores, feedback and a picture, without which there are fewer passes; every pass counts as one
    over the whole row; each GPU of a node has a model of its own; the base's losses are not known from another run.
    """
    if not case.compared_rows or not len(case.val):
        return 0.0
    passes = case.compared_rows * PASSES
    flops = passes * forward(case.shape, case.way).of(case.val) / len(case.val)
    seconds = flops / (gpu.flops * share) + passes * _fixed(case, gpu, 1)
    return seconds / (case.way.processes // case.way.nodes)


def times(case: Case, gpu: Gpu, share: float) -> Times:
    """Return how long a run takes on a product, at a share of its peak."""
    work, processes = amount(case), case.way.processes
    rate = gpu.flops * share
    passes = 4 if case.way.gradient_checkpointing else 3  # the backward pass counts twice
    fixed = _fixed(case, gpu, passes) + 2 * _gathering(case, gpu)
    fixed_evaluation = _fixed(case, gpu, 1) + _gathering(case, gpu)
    step = _step(case, gpu)
    train = work.steps * (work.batches * fixed + step) + work.flops / processes / rate
    evaluate = work.evaluation_batches * fixed_evaluation + work.evaluation_flops / processes / rate
    return Times(
        share_of_peak=share,
        batch_seconds=fixed,
        token_seconds=work.flops / work.tokens / rate if work.tokens else 0.0,
        step_seconds=step,
        seconds=train + evaluate,
        evaluation_share=evaluate / (train + evaluate) if evaluate else 0.0,
    )


def _fixed(case: Case, gpu: Gpu, passes: int) -> float:
    """Return the seconds of a batch without tokens, in some passes over all layers."""
    kernels = case.shape.text.num_hidden_layers * (KERNELS + (0 if case.way.is_full else ADAPTER_KERNELS))
    reading = base_bytes(case.shape, case.way) / gpu.bandwidth
    restoring = quantised_weights(case.shape, case.way) * RESTORED_BYTES / gpu.bandwidth
    return passes * (max(kernels * KERNEL_SECONDS, reading) + restoring)


def _gathering(case: Case, gpu: Gpu) -> float:
    """Return the seconds in which a GPU receives the weights that others, or the main memory, hold.

    With hpZ (arXiv:2306.10209) they come from the GPUs of its node that share a second copy. DeepSpeed makes this copy
    when it first releases a weight, and drops it after each optimizer step if the weight is trained (stage3.py,
    `invalidate_secondary_tensor`). So weights come from all GPUs once a step, which `_step` counts; frozen ones once.
    """
    sharding = case.way.sharding
    within = sharding.second_copy
    missing = 1.0 if sharding.weights_on_host else 1 - 1 / (within or sharding.weights)
    rate = gpu.link if within else _exchange_rate(case.way, gpu)
    return missing * base_bytes(case.shape, case.way) / rate


def _exchange_rate(way: Way, gpu: Gpu) -> float:
    """Return the bytes per second at which all processes gather, or add up, what they share.

    A ring of n processes sends (n - 1) / n of all bytes over each of its links to gather them, and as many to add them
    up (nccl-tests, doc/PERFORMANCE.md). It enters and leaves each node once, so the network of a node carries as many
    as a link within it, and the slower one decides. Several network cards share them, each with a ring of its own.
    NCCL may choose a tree to add up, which sends up to half as much between two nodes: the estimate is then too long.
    """
    return gpu.link if way.nodes == 1 else min(gpu.link, way.network)


def _step(case: Case, gpu: Gpu) -> float:
    """Return the seconds of an optimizer step: gradients are exchanged, and states are read and written.

    DDP exchanges gradients once: each is added up and comes back. DeepSpeed's ZeRO 2 and 3 add them up in each batch
    (stage_1_and_2.py, `reduce_independent_p_g_buckets_and_remove_grads`), and new weights come once.
    """
    way, kept = case.way, states(case.shape, case.way)
    in_each_batch = way.sharding.engine == "deepspeed" and way.sharding.gradients > 1
    exchanges = 1 + (case.settings.gradient_accumulation_steps if in_each_batch else 1)
    exchanged = exchanges * trained_of(case.shape, way) * way.gradient_bytes * (1 - 1 / way.processes)
    return exchanged / _exchange_rate(way, gpu) + 2 * (kept.adapter + kept.gradients + kept.optimizer) / gpu.bandwidth
