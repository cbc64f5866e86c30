"""Whether a run fits its GPU by the estimate, and changes that need less memory; the cheapest first.

Each change is tried with the same estimate. The order: what changes nothing but speed, what lets GPUs share, what
rounds the base; two of these together, if no single one is enough; then what gives up data, and at last other hardware:
more GPUs of a machine, more machines, and another product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from msgspec.structs import asdict

from vlmflow.config.gpus import GPUS, Gpu
from vlmflow.config.strategies import LORA, QLORA, STRATEGIES, ZERO3, Part, Strategy
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.estimate.account import Change, Estimate, Memory
from vlmflow.estimate.memory import memory
from vlmflow.estimate.run import EstimateInput, TrainingMode
from vlmflow.estimate.times import times
from vlmflow.lengths.summary import STEP

GB = 1_000_000_000

NAMED = 4
"""Changes that a message names, at most; the page has all."""

NAMES = {
    "gathered": "weights of other GPUs, and buffers",
    "step": "copies of gradients in the optimizer's step",
    "layer": "one layer again",
    "cache": "reserved and unused",
    "context": "CUDA",
}
"""Names for people of those parts of Memory whose own are none."""

FITS, REFUSED = 0.9, 1.1
"""Shares of a GPU's memory: up to FITS a run fits; up to REFUSED it may; above it is refused."""

PAIRS = 3
"""Pairs of changes that are named, at most."""

MACHINE = 8
"""GPUs of the largest common machine."""

MACHINES = 4
"""Machines that are proposed, at most."""

PARTS_SHARED: tuple[Part, ...] = ("weights", "optimizer")
"""The parts by which strategies are compared: gradients are shared with the optimizer."""

SMALLEST_PICTURE = 64
"""The lowest image_max_tokens that is proposed: 256 × 256 pixels for Qwen3-VL."""


@dataclass(frozen=True)
class ProposedChange:
    """A change to try. keys: the keys with their new values. costs: what it costs. rows_left_out: by max_length."""

    keys: str
    costs: str
    inputs: EstimateInput
    gpu: Gpu
    rows_left_out: int = 0


Attempt = Callable[[EstimateInput, Gpu], ProposedChange | None]
"""Returns a change of a run on a product; None if it does not apply, or would change nothing."""


def share(inputs: EstimateInput, gpu: Gpu) -> float:
    """Return the share of a product's memory that a run needs; more than 1 does not fit."""
    return memory(inputs).total / gpu.memory


def changes(inputs: EstimateInput, gpu: Gpu) -> list[Change]:
    """Return the changes that need less memory than the run does now, the cheapest first.

    Pairs of changes of the training come before what gives up data or needs other GPUs, if no single one is enough.
    """
    tried = _smaller(inputs, gpu, TRAINING)
    if not any(change.fits for change in tried):
        tried += _pairs(inputs, gpu, TRAINING)
    tried += _smaller(inputs, gpu, (*DATA, *HARDWARE))
    if not any(change.fits for change in tried):
        tried += _pairs(inputs, gpu, (*TRAINING, *DATA, *HARDWARE))
    return tried


def _smaller(inputs: EstimateInput, gpu: Gpu, attempts: Sequence[Attempt]) -> list[Change]:
    """Return single changes that need less memory, or another product."""
    needed = memory(inputs).total
    tried = [_change(proposed) for attempt in attempts if (proposed := attempt(inputs, gpu))]
    return [change for change in tried if change.memory < needed or change.gpu != gpu.name]


def _pairs(inputs: EstimateInput, gpu: Gpu, attempts: Sequence[Attempt]) -> list[Change]:
    """Return the first PAIRS pairs of changes with which the run fits."""
    return list(islice((change for change in map(_change, _both(inputs, gpu, attempts)) if change.fits), PAIRS))


def _both(inputs: EstimateInput, gpu: Gpu, attempts: Sequence[Attempt]) -> Iterator[ProposedChange]:
    for first, second in combinations(attempts, 2):
        before = first(inputs, gpu)
        after = second(before.inputs, before.gpu) if before else None
        if before and after:
            costs = {before.costs: None, after.costs: None}
            yield replace(after, keys=f"{before.keys}; {after.keys}", costs="; ".join(costs))


def _change(proposed: ProposedChange) -> Change:
    needed = memory(proposed.inputs).total
    hours = times(proposed.inputs, proposed.gpu, fast=False).hours * proposed.inputs.mode.processes
    return Change(
        what=proposed.keys,
        costs=proposed.costs,
        memory=needed,
        fits=needed <= FITS * proposed.gpu.memory,
        gpu=proposed.gpu.name,
        gpu_hours=hours,
        rows_left_out=proposed.rows_left_out,
    )


def _one_row(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    rows, passes = inputs.settings.per_device_batch_size, inputs.settings.gradient_accumulation_steps
    if rows == 1 or inputs.micro_batch_tokens is not None:
        return None
    changed = inputs.with_settings(per_device_batch_size=1, gradient_accumulation_steps=rows * passes)
    keys = f"train.per_device_batch_size: 1, train.gradient_accumulation_steps: {rows * passes}"
    return ProposedChange(keys, "the same rows in a step, one at a time", changed, gpu)


def _checkpointing(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    if inputs.settings.gradient_checkpointing:
        return None
    changed = inputs.with_settings(gradient_checkpointing=True)
    return ProposedChange("train.gradient_checkpointing: true", "a third more computing", changed, gpu)


def _strategy(name: str, costs: str) -> Attempt:
    def attempt(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
        strategy = STRATEGIES[name]
        changed = inputs.with_mode(strategy=strategy)
        if name not in inputs.mode.tuner.strategies or not _moves_more(inputs.mode, changed.mode):
            return None
        host = memory(changed).host
        in_memory = f", in {host / 1e9:,.0f} GB of main memory for each process" if host else ""
        return ProposedChange(f"strategy: {name}", f"{costs}{in_memory}", changed, gpu)

    return attempt


def _moves_more(now: TrainingMode, other: TrainingMode) -> bool:
    """Return whether another strategy shares more, or moves more to main memory."""

    def moved(strategy: Strategy) -> tuple[bool, bool]:
        return "weights" in strategy.offloads, "optimizer" in strategy.offloads

    more = any(other.shares(part) > now.shares(part) for part in PARTS_SHARED)
    return more or moved(other.strategy) > moved(now.strategy)


def _four_bits(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    if inputs.mode.tuner != LORA or inputs.mode.strategy.engine != "ddp":
        return None
    changed = inputs.with_mode(tuner=QLORA)
    return ProposedChange(
        f"tuner: {QLORA.name}", "slower; the base is rounded to 4 bits while the adapter is trained", changed, gpu
    )


def _smaller_pictures(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    if inputs.shape.budget(inputs.settings.image_max_tokens).most is None:
        return None
    most = min(inputs.settings.image_max_tokens, max(row.pictures for row in inputs.train.extremes()))
    tokens = 1 << max(most - 1, 1).bit_length()
    while (tokens := tokens // 2) >= SMALLEST_PICTURE:
        changed = inputs.with_settings(image_max_tokens=tokens)
        if tokens < most and (share(changed, gpu) <= FITS or tokens == SMALLEST_PICTURE):
            return ProposedChange(f"train.image_max_tokens: {tokens}", "pictures are scaled down", changed, gpu)
    return None


def _shorter_rows(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    tokens = longest_that_fits(inputs, gpu)
    if not tokens or tokens >= inputs.settings.max_length:
        return None
    changed = inputs.with_settings(max_length=tokens)
    left_out = len(inputs.train) - len(changed.train)
    if left_out > len(changed.train):
        return None  # what is left is no longer the data set
    costs = f"{left_out:,} of {len(inputs.train):,} rows are too long for it (over_long)"
    return ProposedChange(f"train.max_length: {tokens}", costs, changed, gpu, left_out)


def longest_that_fits(inputs: EstimateInput, gpu: Gpu) -> int:
    """Return the highest max_length, a multiple of STEP up to the run's own, with which the run fits; 0 if none does.

    Only lengths that leave a row to train on count.
    """
    low, high = 0, inputs.settings.max_length // STEP
    while low < high:
        middle = (low + high + 1) // 2
        changed = inputs.with_settings(max_length=middle * STEP)
        low, high = (middle, high) if share(changed, gpu) <= FITS else (low, middle - 1)
    return low * STEP if len(inputs.with_settings(max_length=low * STEP).train) else 0


def _more_gpus(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    nodes, processes = inputs.mode.nodes, inputs.mode.processes // inputs.mode.nodes
    if ZERO3.name not in inputs.mode.tuner.strategies:
        return None
    while (processes := processes * 2) <= MACHINE:
        changed = _on_gpus(inputs, nodes, processes)
        if share(changed, gpu) <= FITS or processes * 2 > MACHINE:
            return _same_rows(inputs, changed, gpu, f"processes: {processes}", "more GPUs at a time")
    return None


def _more_nodes(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    """Return the run on more whole machines, where all GPUs of those that it has are not enough."""
    nodes, processes = inputs.mode.nodes, max(MACHINE, inputs.mode.processes // inputs.mode.nodes)
    if ZERO3.name not in inputs.mode.tuner.strategies or processes % inputs.settings.sequence_parallel:
        return None
    if share(_on_gpus(inputs, nodes, processes), gpu) <= FITS:
        return None
    while (nodes := nodes * 2) <= MACHINES:
        changed = _on_gpus(inputs, nodes, processes)
        if share(changed, gpu) <= FITS:
            costs = "more machines of a cluster; weights cross the network between them for each pass"
            return _same_rows(inputs, changed, gpu, f"nodes: {nodes}, processes: {processes}", costs)
    return None


def _on_gpus(inputs: EstimateInput, nodes: int, processes: int) -> EstimateInput:
    """Return the same run on other GPUs, with zero3. processes: of each node, as in a run's settings."""
    return inputs.with_mode(nodes=nodes, processes=nodes * processes, strategy=ZERO3)


def _same_rows(inputs: EstimateInput, changed: EstimateInput, gpu: Gpu, keys: str, costs: str) -> ProposedChange:
    """Return the change to more GPUs with zero3, with the same rows in a step if these can be divided."""
    keys = f"{keys}, strategy: {ZERO3.name}"
    passes = inputs.settings.gradient_accumulation_steps * inputs.mode.processes / changed.mode.processes
    if passes != int(passes) or passes < 1:
        return ProposedChange(keys, f"{costs}, more rows in a step", changed, gpu)
    changed = changed.with_settings(gradient_accumulation_steps=int(passes))
    return ProposedChange(f"{keys}, train.gradient_accumulation_steps: {int(passes)}", costs, changed, gpu)


def _other_product(inputs: EstimateInput, gpu: Gpu) -> ProposedChange | None:
    for other in sorted(GPUS.values(), key=lambda product: product.memory):
        if other.memory > gpu.memory and share(inputs, other) <= FITS:
            return ProposedChange(f"gpu: {other.name}", "another product", inputs, other)
    return None


TRAINING: tuple[Attempt, ...] = (
    _one_row,
    _checkpointing,
    _strategy("zero2", "gradients and optimizer are shared"),
    _strategy("fsdp2", "weights come from the other GPUs for each pass"),
    _strategy("zero3", "weights come from the other GPUs for each pass, while nothing is computed"),
    _four_bits,
    _strategy("zero2_offload", "the optimizer works on the CPU"),
    _strategy("zero3_offload", "slow: the weights come from main memory, and the optimizer works on the CPU"),
)
DATA: tuple[Attempt, ...] = (_smaller_pictures, _shorter_rows)
HARDWARE: tuple[Attempt, ...] = (_more_gpus, _more_nodes, _other_product)
"""All changes, the cheapest first: of the training, of the data, of the GPUs."""


def parts_of(memory: Memory) -> list[tuple[str, int]]:
    """Return the parts of the worst moment with their bytes, the largest first; together they are `memory.total`."""
    if memory.step > memory.passing:
        others = {"host", "activations", "layer", "logits", "pictures"}
    else:
        others = {"host", "step", "logits" if memory.layer > memory.logits else "layer"}
    parts = [(NAMES.get(name, name), size) for name, size in asdict(memory).items() if name not in others and size]
    return sorted(parts, key=lambda part: -part[1])


def spread_of(estimate: Estimate) -> str:
    """Return how the processes of a run are spread, to follow their number: " (2 nodes × 8 processes)"; "" on one."""
    if estimate.nodes == 1:
        return ""
    return f" ({estimate.nodes} nodes × {estimate.processes // estimate.nodes} processes)"


def in_words(estimate: Estimate, run: str, *, on_gpu: bool) -> str:
    """Return what a run needs of each GPU, in one line; of each process, if it trains on the CPU."""
    needed, spread = f"{run}: {estimate.memory.total / GB:.1f} GB", spread_of(estimate)
    if not on_gpu:
        return f"{needed} of main memory for each of {counted(estimate.processes, 'process')}{spread}"
    needed += f" on each of {counted(estimate.processes, 'GPU')}{spread} by the estimate"
    on = estimate.on(estimate.gpu)
    if on is None:
        return f"{needed}; runs.NAME.gpu names no product to compare it with"
    gpu = GPUS[on.gpu]
    compared = f"{needed}, {on.memory_share:.0%} of {gpu.title}'s {gpu.memory / GB:.0f} GB"
    if on.memory_share <= FITS:
        return compared
    return f"{compared}: {', '.join(f'{name} {size / GB:.1f}' for name, size in parts_of(estimate.memory))}"


def judge(estimate: Estimate, run: str, *, on_gpu: bool, ignored: bool) -> None:
    """Log the estimate of a run's memory; warn above FITS of its GPU's memory.

    on_gpu: whether it trains on GPUs; on the CPU nothing is refused. ignored: whether the run starts in any case
    (`runs.NAME.estimate: ignore`).

    Raises VlmflowError above REFUSED, with the parts and what would make it fit.
    """
    needs, on = in_words(estimate, run, on_gpu=on_gpu), estimate.on(estimate.gpu)
    if not on_gpu or on is None or on.memory_share <= FITS:
        log.info(needs)
        return
    if on.memory_share > REFUSED and not ignored:
        raise VlmflowError(
            needs,
            f"{advice(estimate.changes)}; reports/estimate-{run}.html has all figures; to start it in any case, set "
            "runs.NAME.estimate: ignore",
        )
    log.warning(f"{needs}. It may not fit; {advice(estimate.changes)}")


def advice(changes: list[Change]) -> str:
    """Return what would make a run fit, in one line, the cheapest first."""
    fitting = [change for change in changes if change.fits][:NAMED]
    if not fitting:
        return "no change that was tried makes it fit: take a smaller model or a GPU with more memory"
    return "cheapest first: " + "; or ".join(map(_with_figures, fitting))


def _with_figures(change: Change) -> str:
    left_out = f", {change.rows_left_out:,} rows left out" if change.rows_left_out else ""
    return f"{change.what} ({change.memory / GB:.1f} GB{left_out})"
