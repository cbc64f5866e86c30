"""The account of `estimate_run` (`estimates/RUN.json`), also beside what trainings measured.

Memory and disk in bytes, times in seconds, money as given.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account
from vlmflow.core.errors import log
from vlmflow.supervisor.report import TrainingReport

SHARE = 0.85
"""The share of a GPU's memory that the first smoke run may take by the estimate."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU, at the worst moment of a training step.

    weights: of the base, and a second copy of all weights with hpZ. adapter, gradients, optimizer: of what is trained.
    gathered: buffers for weights that other GPUs hold, and for exchanging gradients. activations: what the backward
    pass needs of all layers. layer: to compute one layer again, and its gradients. logits: logits and loss; not at the
    same time as `layer`. pictures: pixels and picture tower. step: what an optimizer step copies, at another time than
    all of these. cache: what PyTorch reserves and does not use. context: CUDA and communication. host: main memory for
    each process, with offload.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int = 0
    layer: int = 0
    logits: int = 0
    pictures: int = 0
    context: int = 0
    host: int = 0
    step: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it at the worst moment, in bytes."""
        states = self.weights + self.adapter + self.gradients + self.optimizer + self.gathered
        return states + max(self.passing, self.step) + self.cache + self.context

    @property
    def passing(self) -> int:
        """What a forward and a backward pass need beside what is there all the time, in bytes."""
        return self.activations + max(self.layer, self.logits) + self.pictures


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long the run takes on one kind of GPU: training and evaluations, and their parts.

    share_of_peak: of the GPU's dense operations. batch_seconds, token_seconds: a batch of one GPU with n tokens takes
    max(batch_seconds, n · token_seconds), for it computes while further kernels are started. exchange_seconds: what
    each batch takes besides: weights come from other GPUs, or are restored from 4 bits. step_seconds: what an optimizer
    step takes besides its batches. evaluation_share: the evaluations' part of `seconds`, 0 to 1.
    """

    share_of_peak: float
    batch_seconds: float
    token_seconds: float
    step_seconds: float
    seconds: float
    exchange_seconds: float = 0.0
    evaluation_share: float

    @property
    def hours(self) -> float:
        """Training and evaluations together, in hours."""
        return self.seconds / 3600


class OnProduct(msgspec.Struct, frozen=True, kw_only=True):
    """The run on GPUs of one product (`config.gpus`).

    memory_share: of the GPU's memory that is needed; more than 1 does not fit. fast, slow: at its high and its
    low share of peak. fast_price, slow_price: of all GPUs, null without a price per hour. fast_comparison,
    slow_comparison: seconds to compare the tuned model with its base; 0 if the run does not ask for it.
    """

    gpu: str
    memory_share: float
    fast: Times
    slow: Times
    fast_price: float | None = None
    slow_price: float | None = None
    fast_comparison: float = 0.0
    slow_comparison: float = 0.0


class Disk(msgspec.Struct, frozen=True):
    """Bytes on disk: the base model, the merged one, one checkpoint, and all that a run folder keeps at a time."""

    model: int
    merged: int
    checkpoint: int
    checkpoints: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the run's settings.

    what: the keys with their new values. costs: what it costs. memory: of one GPU. gpu: the product that it is for.
    gpu_hours: of all GPUs together, at the low share of peak; null without a product. rows_left_out: those that a lower
    max_length leaves out.
    """

    what: str
    costs: str
    memory: int
    fits: bool
    gpu: str | None = None
    gpu_hours: float | None = None
    rows_left_out: int = 0


class Needs(msgspec.Struct, frozen=True):
    """The memory of one GPU in bytes with micro-batches of a number of tokens."""

    micro_batch_tokens: int
    gradient_checkpointing: bool
    memory: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="estimate"):
    """The estimate of a run.

    gpu: the run's own product, null if it names none. processes: GPUs, on all nodes together. weights, trained:
    numbers, of the base and of what is trained. steps, rows, tokens: of the whole training. flops: operations of
    training and evaluations. longest: tokens of the longest row that fits. memory: of one GPU. changes: what would make
    it fit `gpu`, the cheapest first; [] if it fits. nodes: machines; an account of before has none, and means one.
    evaluations: on val; 0 in an account of before. micro_batch_tokens, gradient_checkpointing: with which it is
    estimated; null for per_device_batch_size rows per pass. one_row_each: so many times as long one row per pass would
    take on `gpu`; null without micro-batches. passes: what `auto` may come to mean. notes: assumptions in place of a
    measurement, for people.
    """

    gpu: str | None
    processes: int
    weights: int
    trained: int
    steps: int
    rows: int
    tokens: int
    flops: float
    longest: int
    memory: Memory
    products: list[OnProduct]
    disk: Disk
    changes: list[Change]
    nodes: int = 1
    evaluations: int = 0
    micro_batch_tokens: int | None = None
    gradient_checkpointing: bool = True
    one_row_each: float | None = None
    passes: list[Needs] = []
    notes: list[str] = []

    def on(self, gpu: str | None) -> OnProduct | None:
        """Return the run on a product; None for no product."""
        return next((product for product in self.products if product.gpu == gpu), None)


class NoEstimate(msgspec.Struct, frozen=True, tag_field="kind", tag="none"):
    """A run of a model that the estimate does not know. reason: for people."""

    reason: str


Result = Estimate | NoEstimate


def read_estimate(file: Path) -> Result:
    """Read the account of `estimate_run`; raises VlmflowError as `read_account` does."""
    return read_account(file, Result)  # type: ignore[arg-type]  # msgspec reads a union by its tag


def fits_by(estimate: Result, memory_of_gpu: Callable[[], int]) -> Callable[[int, bool], bool] | None:
    """Return whether micro-batches fit a GPU by an estimate; None if it has none for `auto`.

    The function takes their tokens, one of NUMBERS, and gradient_checkpointing. memory_of_gpu: gives its bytes.
    """
    if not isinstance(estimate, Estimate) or not estimate.passes:
        return None
    room = SHARE * memory_of_gpu()
    needs = {(need.micro_batch_tokens, need.gradient_checkpointing): need.memory for need in estimate.passes}
    return lambda number, again: needs[number, again] <= room


class Compared(msgspec.Struct, frozen=True):
    """One figure. unit: of both values ("bytes", "steps", "tokens/s", "hours").

    estimated: null where nothing was estimated. up_to: the upper end, where the estimate is a range. measured: null
    where nothing was measured.
    """

    name: str
    unit: str
    estimated: float | None
    measured: float | None
    up_to: float | None = None

    @property
    def error(self) -> float | None:
        """The estimate relative to what was measured, less 1; of a range, its distance. Null where one is missing."""
        if self.estimated is None or not self.measured:
            return None
        return nearest(self.measured, self.estimated, self.up_to) / self.measured - 1


def nearest(measured: float, estimated: float, up_to: float | None) -> float:
    """Return the estimate, or of a range up to `up_to` the value that is nearest to what was measured."""
    return min(max(measured, estimated), estimated if up_to is None else up_to)


def compare(estimate: Estimate, report: TrainingReport) -> list[Compared]:
    """Return the figures of a run's estimate beside those of one of its trainings, the smoke run or the full run.

    Speed and hours are compared if the run names its GPU product; steps and hours only with a training of all steps.
    """
    on_gpu = report.device != "cpu"
    figures = []
    if on_gpu:
        peak = max(report.peak_memory, default=None)
        figures.append(Compared("memory of one GPU", "bytes", estimate.memory.total, peak))
    on = estimate.on(estimate.gpu) if on_gpu else None
    if on:
        slow, fast = (estimate.tokens / times.seconds for times in (on.slow, on.fast))
        figures.append(Compared("speed of all GPUs", "tokens/s", slow, report.tokens_per_second, fast))
    if report.target == estimate.steps:
        figures.append(Compared("optimizer steps", "steps", estimate.steps, report.steps))
        if on:
            hours = report.seconds / 3600
            figures.append(Compared("training and evaluations", "hours", on.fast.hours, hours, on.slow.hours))
    return figures


def log_compared(estimate: Result, report: TrainingReport, run: str) -> None:
    """Log each figure of a run's estimate that a training has measured."""
    for figure in [] if isinstance(estimate, NoEstimate) else compare(estimate, report):
        if figure.error is not None:
            log.info(
                f"{run}: {figure.name}: measured {figure.measured:,.4g} {figure.unit}, the estimate is "
                f"{figure.error:+.0%} off"
            )
