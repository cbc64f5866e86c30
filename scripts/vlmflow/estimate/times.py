"""How long a training takes on a GPU product, from its operations and the GPU's rates.

A multiplication with its addition counts as two operations. A row has L tokens, T of them trained, and n pictures with
P tokens together. For each, forward and backward:

    decoder     (2 + 2) · D · L    D: weights of the matrices that a token goes through; backward to activations
    adapter     (2 + 4) · A · L    A: weights of the adapter; backward to activations and weights
    attention   (2 + 4) · H · L²   H: width of all queries, over all layers; queries by keys, and the result by values,
                                   each over the causal half; a window is not counted as less
    output      (2 + 2) · O · T    O: weights of the head; only trained tokens need logits
    pictures    a · P + b · P² / n what PyTorch counts in a pass of the tower (`fake_pass`)

A part that is trained needs 2 more for its weights, and 2 for the gradient that reaches it. Gradient checkpointing
repeats the forward pass of all layers. Model FLOPs (arXiv:2204.02311, appendix B) leave out this repetition.
`tests/stages/test_work_formula.py` compares the formula with what PyTorch counts.

A batch takes max(a, b · tokens), and what it exchanges. a: the kernels that Python starts one by one, or reading all
weights, whichever takes longer. b: the operations of a token at a share of the GPU's peak. The GPU computes while
further kernels are started, so the longer one decides: measured with 256, 512, 1,024 and 2,048 tokens, a batch takes
150, 188, 350 and 650 ms (QwenLM, 7B, LoRA, A100). Exchanged are the weights that other GPUs hold, which come over the
link between them, or over the network between nodes, for each forward and each backward pass (`overlap_comm: false`);
and the weights in 4 bits are restored.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmflow.config.gpus import Gpu
from vlmflow.estimate.account import Times
from vlmflow.estimate.memory import Line, base_bytes, pictures_of, quantised_weights, states, trained_of
from vlmflow.estimate.run import EstimateInput, RowLengths, TrainingMode
from vlmflow.estimate.shape import LANGUAGE, ModelShape, adapted, adapter_weights
from vlmflow.lengths.steps import Steps, data_parallel_ranks, evaluations_of

Floats = NDArray[np.float64]

KERNEL_SECONDS = 23e-6, 33e-6
"""Seconds until Python has started a kernel, low and high: 10 to 14 ms for the 420 of a layer with adapters and
gradient checkpointing (8B, 36 layers, H100: 0.35 s in a bare loop, 0.50 s through ms-swift)."""

RESTORED_BYTES = 4.5
"""Bytes that restoring a weight from 4 bits moves: it is read, written in 16 bits, and read again as such."""

KERNELS, ADAPTER_KERNELS = 45, 60
"""Kernels of a layer's forward pass, and those that adapters add."""


PASSES = 28
"""Forward passes that the rule `evaluate` makes for a row, at most: fourteen with each model, of a right and a wrong
answer in seven contexts (`evaluation.measure`)."""


@dataclass(frozen=True)
class Work:
    """Operations per token, per square of a row's tokens, per logit position, per picture token, and per square."""

    token: float
    token_square: float
    logit: float
    picture: float
    picture_square: float

    def of(self, rows: RowLengths) -> float:
        """Return the operations of all rows."""
        return float(self.of_each(rows).sum())

    def of_each(self, rows: RowLengths) -> Floats:
        """Return the operations of each row, with its pictures as equally large.

        The tower's attention is within a picture.
        """
        tokens, pictures = rows.tokens.astype(float), rows.pictures.astype(float)
        operations: Floats = (
            self.token * tokens
            + self.token_square * np.square(tokens)
            + self.logit * rows.trained.astype(float)
            + self.picture * pictures
            + self.picture_square * np.square(pictures) / rows.shown
        )
        return operations


def forward(shape: ModelShape, mode: TrainingMode) -> Work:
    """Return the operations of a forward pass."""
    return _work(shape, mode, passes=1, backward=False)


def training(shape: ModelShape, mode: TrainingMode) -> Work:
    """Return the operations that a GPU really does for forward and backward pass."""
    return _work(shape, mode, passes=2 if mode.gradient_checkpointing else 1, backward=True)


def _work(shape: ModelShape, mode: TrainingMode, passes: int, backward: bool) -> Work:
    """Return the operations of a pass. passes: how often the layers are computed forward."""
    size = shape.of
    language = sum(
        matrix.count * matrix.weights * matrix.active / matrix.experts
        for matrix in size.matrices
        if matrix.in_layers and matrix.part == LANGUAGE
    )
    own_weights = 2 if mode.is_full and LANGUAGE in mode.trained else 0
    back = 2 + own_weights if backward else 0
    lora = mode.settings.lora
    matrices = [] if mode.is_full else adapted(shape, mode.trained, lora.target_modules)
    adapter = adapter_weights((matrix for matrix in matrices if matrix.part == LANGUAGE), lora.rank)
    both = 4 if backward else 0
    token = (2 * passes + back) * language + (2 * passes + both) * adapter
    pictures = _pictures(shape, mode, backward)
    return Work(
        token=token,
        token_square=float((2 * passes + both) * size.attention),
        logit=(2 + back) * size.head,
        picture=token if pictures is None else pictures.token,
        picture_square=0.0 if pictures is None else pictures.square,
    )


def _pictures(shape: ModelShape, mode: TrainingMode, backward: bool) -> Line | None:
    """Return the operations for pictures; None if they count as in the language model (`memory.assumed`)."""
    if not shape.of.sees:
        return Line(0, 0)
    operations = pictures_of(shape, mode)
    if isinstance(operations, str):
        return None
    return operations.training if backward else operations.forward


@dataclass(frozen=True)
class Batches:
    """Batches that stand for all those of a run.

    flops: operations of one GPU, by group of rows. counts: into how many batches each group is cut.
    """

    flops: Floats
    counts: Floats

    @property
    def of_a_group(self) -> float:
        """Into how many batches a group is cut on average."""
        return float(self.counts.mean()) if len(self.counts) else 0.0

    def seconds(self, rate: float, least: float, besides: float) -> float:
        """Return what a group takes on average.

        rate: operations per second. least: seconds of a batch, whatever its tokens. besides: what it takes in addition.
        """
        if not len(self.flops):
            return 0.0
        seconds = besides + np.maximum(least, self.flops / self.counts / rate)
        return float((self.counts * seconds).mean())


@dataclass(frozen=True)
class Amount:
    """How much work a run is.

    steps: optimizer steps. evaluations: on val. tokens: of the whole training. flops, evaluation_flops: of training and
    of all evaluations. groups, evaluation_groups: how often one GPU takes a group of `batches`, in a step, or
    `evaluation_batches`, in all evaluations.
    """

    steps: int
    evaluations: int
    tokens: int
    flops: float
    evaluation_flops: float
    groups: int
    batches: Batches
    evaluation_groups: int
    evaluation_batches: Batches


def amount(inputs: EstimateInput) -> Amount:
    """Return how much work a run is; all zero without rows."""
    settings, processes = inputs.settings, inputs.mode.processes
    nothing = Batches(np.zeros(0), np.zeros(0))
    if not len(inputs.train):
        return Amount(0, 0, 0, 0.0, 0.0, 0, nothing, 0, nothing)
    count = Steps.of(len(inputs.train), settings, processes)
    passes = count.total / count.per_epoch * count.rows / len(inputs.train)
    evaluations = evaluations_of(count.total, settings)
    most, accumulated = inputs.micro_batch_tokens, settings.gradient_accumulation_steps
    size = settings.per_device_batch_size * (1 if most is None else accumulated)
    trained, read = training(inputs.shape, inputs.mode), forward(inputs.shape, inputs.mode)
    return Amount(
        steps=count.total,
        evaluations=evaluations,
        tokens=round(passes * int(inputs.train.tokens.sum())),
        flops=passes * trained.of(inputs.train),
        evaluation_flops=evaluations * read.of(inputs.val),
        groups=accumulated if most is None else 1,
        batches=_batches(trained, inputs, inputs.train, size, most),
        evaluation_groups=evaluations * -(-len(inputs.val) // (data_parallel_ranks(settings, processes) * size)),
        evaluation_batches=_batches(read, inputs, inputs.val, size, most),
    )


def _batches(work: Work, inputs: EstimateInput, rows: RowLengths, size: int, most: int | None) -> Batches:
    """Return the batches of groups of `size` rows: each group is one padded batch, or several of at most `most` tokens.

    Processes with sequence_parallel share them.
    """
    if not len(rows):
        return Batches(np.zeros(0), np.zeros(0))
    groups = rows.grouped(size)
    tokens = rows.tokens[groups].astype(float)
    flops = work.of_each(rows)[groups].sum(axis=1)
    if most is None:
        flops += work.token * (tokens.max(axis=1) * groups.shape[1] - tokens.sum(axis=1))
        counts = np.ones(len(groups))
    else:
        counts = np.ceil(tokens.sum(axis=1) / most)
    return Batches(flops / inputs.settings.sequence_parallel, counts)


def comparison_seconds(inputs: EstimateInput, gpu: Gpu, *, fast: bool) -> float:
    """Return how long the rule `evaluate` takes on a product, without loading the models. fast: see `times`.

    At most: each row has scores, feedback and a picture, without which there are fewer passes; every pass counts as one
    over the whole row; each GPU of a node has a model of its own; the base's losses are not known from another run.
    """
    if not inputs.compared_rows or not len(inputs.val):
        return 0.0
    passes = inputs.compared_rows * PASSES
    rows = _batches(forward(inputs.shape, inputs.mode), inputs, inputs.val, 1, None)
    row = rows.seconds(gpu.flops * _share(gpu, fast), _least(inputs, gpu, 1, fast), _restoring(inputs, gpu, 1))
    return passes * row / (inputs.mode.processes // inputs.mode.nodes)


def times(inputs: EstimateInput, gpu: Gpu, *, fast: bool) -> Times:
    """Return how long a run takes on a product. fast: at its high share of the peak; otherwise at its low one."""
    work = amount(inputs)
    rate = gpu.flops * _share(gpu, fast)
    passes = 4 if inputs.mode.gradient_checkpointing else 3  # the backward pass counts twice
    least, besides = _least(inputs, gpu, passes, fast), _restoring(inputs, gpu, passes) + 2 * _gathering(inputs, gpu)
    step = _step(inputs, gpu, work.groups * work.batches.of_a_group)
    train = work.steps * (work.groups * work.batches.seconds(rate, least, besides) + step)
    evaluate = work.evaluation_groups * work.evaluation_batches.seconds(
        rate, _least(inputs, gpu, 1, fast), _restoring(inputs, gpu, 1) + _gathering(inputs, gpu)
    )
    return Times(
        share_of_peak=_share(gpu, fast),
        batch_seconds=least,
        token_seconds=work.flops / work.tokens / rate if work.tokens else 0.0,
        exchange_seconds=besides,
        step_seconds=step,
        seconds=train + evaluate,
        evaluation_share=evaluate / (train + evaluate) if evaluate else 0.0,
    )


def _share(gpu: Gpu, fast: bool) -> float:
    low, high = gpu.shares
    return high if fast else low


def _least(inputs: EstimateInput, gpu: Gpu, passes: int, fast: bool) -> float:
    """Return the seconds that a batch takes at least, in some passes over all layers."""
    low, high = KERNEL_SECONDS
    kernels = inputs.shape.of.layers * (KERNELS + (0 if inputs.mode.is_full else ADAPTER_KERNELS))
    reading = base_bytes(inputs.shape, inputs.mode) / gpu.bandwidth
    return passes * max(kernels * (low if fast else high), reading)


def _restoring(inputs: EstimateInput, gpu: Gpu, passes: int) -> float:
    """Return the seconds in which weights are restored from 4 bits, in some passes over all layers."""
    return passes * quantised_weights(inputs.shape, inputs.mode) * RESTORED_BYTES / gpu.bandwidth


def _gathering(inputs: EstimateInput, gpu: Gpu) -> float:
    """Return the seconds in which a GPU receives the weights that others, or the main memory, hold.

    With hpZ (arXiv:2306.10209) they come from the GPUs of its node that share a second copy. DeepSpeed makes this copy
    when it first releases a weight, and drops it after each optimizer step if the weight is trained (stage3.py,
    `invalidate_secondary_tensor`). So weights come from all GPUs once a step, which `_step` counts; frozen ones once.
    """
    strategy, within = inputs.mode.strategy, inputs.mode.strategy.second_copy
    missing = 1.0 if "weights" in strategy.offloads else 1 - 1 / (within or inputs.mode.shares("weights"))
    rate = gpu.link if within else _exchange_rate(inputs.mode, gpu)
    return missing * base_bytes(inputs.shape, inputs.mode) / rate


def _exchange_rate(mode: TrainingMode, gpu: Gpu) -> float:
    """Return the bytes per second at which all processes gather, or add up, what they share.

    A ring of n processes sends (n - 1) / n of all bytes over each of its links to gather them, and as many to add them
    up (nccl-tests, doc/PERFORMANCE.md). It enters and leaves each node once, so the network of a node carries as many
    as a link within it, and the slower one decides. Several network cards share them, each with a ring of its own.
    NCCL may choose a tree to add up, which sends up to half as much between two nodes: the estimate is then too long.
    """
    return gpu.link if mode.nodes == 1 else min(gpu.link, mode.network)


def _step(inputs: EstimateInput, gpu: Gpu, batches: float) -> float:
    """Return the seconds of an optimizer step: gradients are exchanged, and states are read and written.

    batches: those of a step on each GPU.

    DDP exchanges gradients once: each is added up and comes back. DeepSpeed's ZeRO 2 and 3 add them up in each batch
    (stage_1_and_2.py, `reduce_independent_p_g_buckets_and_remove_grads`), and new weights come once.
    """
    mode, kept = inputs.mode, states(inputs.shape, inputs.mode)
    in_each_batch = mode.strategy.engine == "deepspeed" and mode.shares("gradients") > 1
    exchanges = 1 + (batches if in_each_batch else 1)
    exchanged = exchanges * trained_of(inputs.shape, mode) * mode.trained_bytes * (1 - 1 / mode.processes)
    return exchanged / _exchange_rate(mode, gpu) + 2 * (kept.adapter + kept.gradients + kept.optimizer) / gpu.bandwidth
