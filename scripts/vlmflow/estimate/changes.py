"""Changes of a run that need less memory, each tried with the same estimate; the cheapest first.

The order: what changes nothing but speed, what lets GPUs share, what rounds the base; two of these together, if no
single one is enough; then what gives up data, and at last other hardware: more GPUs of a machine, more machines, and
another product.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from vlmflow.config.gpus import GPUS, Gpu
from vlmflow.config.strategies import STRATEGIES, ZERO3
from vlmflow.config.tuners import LORA, QLORA, tuner_of
from vlmflow.estimate.accounts import Change
from vlmflow.estimate.case import Case, sharding_of
from vlmflow.estimate.memory import memory
from vlmflow.estimate.times import times
from vlmflow.estimate.way import Sharding
from vlmflow.lengths.accounts import STEP

FITS, REFUSED = 0.9, 1.1
"""Shares of a GPU's memory: up to FITS a run fits; up to REFUSED it may; above it is refused."""

PAIRS = 3
"""Pairs of changes that are named, at most."""

MACHINE = 8
"""GPUs of the largest common machine."""

MACHINES = 4
"""Machines that are proposed, at most."""

SMALLEST_PICTURE = 64
"""The lowest image_max_tokens that is proposed: 256 × 256 pixels for Qwen3-VL."""


@dataclass(frozen=True)
class Idea:
    """A change to try. what: the keys with their new values. costs: what it costs. rows_left_out: by max_length."""

    what: str
    costs: str
    case: Case
    gpu: Gpu
    rows_left_out: int = 0


Try = Callable[[Case, Gpu], Idea | None]
"""Returns a change of a run on a product; None if it does not apply, or would change nothing."""


def share(case: Case, gpu: Gpu) -> float:
    """Return the share of a product's memory that a run needs; more than 1 does not fit."""
    return memory(case).total / gpu.memory


def changes(case: Case, gpu: Gpu) -> list[Change]:
    """Return the changes that need less memory than the run does now, the cheapest first.

    Pairs of changes of the training come before what gives up data or needs other GPUs, if no single one is enough.
    """
    found = _smaller(case, gpu, TRAINING)
    if not _any_fits(found):
        found += _pairs(case, gpu, TRAINING)
    found += _smaller(case, gpu, (*DATA, *HARDWARE))
    if not _any_fits(found):
        found += _pairs(case, gpu, (*TRAINING, *DATA, *HARDWARE))
    return found


def _smaller(case: Case, gpu: Gpu, attempts: Sequence[Try]) -> list[Change]:
    """Return single changes that need less memory, or another product."""
    needed = memory(case).total
    found = [_change(idea) for attempt in attempts if (idea := attempt(case, gpu))]
    return [one for one in found if one.memory < needed or one.gpu != gpu.name]


def _any_fits(found: Iterable[Change]) -> bool:
    return any(one.fits for one in found)


def _pairs(case: Case, gpu: Gpu, attempts: Sequence[Try]) -> list[Change]:
    """Return the first PAIRS pairs of changes with which the run fits."""
    return list(islice((one for one in map(_change, _both(case, gpu, attempts)) if one.fits), PAIRS))


def _both(case: Case, gpu: Gpu, attempts: Sequence[Try]) -> Iterator[Idea]:
    for first, second in combinations(attempts, 2):
        before = first(case, gpu)
        after = second(before.case, before.gpu) if before else None
        if before and after:
            costs = {before.costs: None, after.costs: None}
            yield replace(after, what=f"{before.what}; {after.what}", costs="; ".join(costs))


def _change(idea: Idea) -> Change:
    needed = memory(idea.case).total
    hours = times(idea.case, idea.gpu, fast=False).hours * idea.case.way.processes
    return Change(
        what=idea.what,
        costs=idea.costs,
        memory=needed,
        fits=needed <= FITS * idea.gpu.memory,
        gpu=idea.gpu.name,
        gpu_hours=hours,
        rows_left_out=idea.rows_left_out,
    )


def _one_row(case: Case, gpu: Gpu) -> Idea | None:
    rows, passes = case.settings.per_device_batch_size, case.settings.gradient_accumulation_steps
    if rows == 1 or case.micro_batch_tokens is not None:
        return None
    changed = case.with_settings(per_device_batch_size=1, gradient_accumulation_steps=rows * passes)
    what = f"train.per_device_batch_size: 1, train.gradient_accumulation_steps: {rows * passes}"
    return Idea(what, "the same rows in a step, one at a time", changed, gpu)


def _checkpointing(case: Case, gpu: Gpu) -> Idea | None:
    if case.settings.gradient_checkpointing:
        return None
    changed = case.with_settings(gradient_checkpointing=True)
    return Idea("train.gradient_checkpointing: true", "a third more computing", changed, gpu)


def _strategy(name: str, costs: str) -> Try:
    def attempt(case: Case, gpu: Gpu) -> Idea | None:
        now, sharing = case.way.sharding, sharding_of(STRATEGIES[name], case.way.processes)
        if name not in _supported(case) or not _moves_more(now, sharing):
            return None
        changed = case.with_sharding(sharing)
        host = memory(changed).host
        in_memory = f", in {host / 1e9:,.0f} GB of main memory for each process" if host else ""
        return Idea(f"strategy: {name}", f"{costs}{in_memory}", changed, gpu)

    return attempt


def _moves_more(now: Sharding, other: Sharding) -> bool:
    """Return whether another strategy shares more, or moves more to main memory."""
    more = other.weights > now.weights or other.optimizer > now.optimizer
    return more or (other.weights_on_host, other.optimizer_on_host) > (now.weights_on_host, now.optimizer_on_host)


def _supported(case: Case) -> set[str]:
    """Return the names of the strategies with which a run's tuner is supported."""
    return STRATEGIES.keys() & set(tuner_of(case.way.tuner).strategies)


def _four_bits(case: Case, gpu: Gpu) -> Idea | None:
    if case.way.tuner != LORA.name or case.way.sharding.engine != "ddp":
        return None
    changed = replace(case, way=replace(case.way, tuner=QLORA.name))
    return Idea(
        f"tuner: {QLORA.name}", "slower; the base is rounded to 4 bits while the adapter is trained", changed, gpu
    )


def _smaller_pictures(case: Case, gpu: Gpu) -> Idea | None:
    if case.shape.budget(case.settings.image_max_tokens).most is None:
        return None
    most = min(case.settings.image_max_tokens, max(row.pictures for row in case.train.extremes()))
    tokens = 1 << max(most - 1, 1).bit_length()
    while (tokens := tokens // 2) >= SMALLEST_PICTURE:
        changed = case.with_settings(image_max_tokens=tokens)
        if tokens < most and (share(changed, gpu) <= FITS or tokens == SMALLEST_PICTURE):
            return Idea(f"train.image_max_tokens: {tokens}", "pictures are scaled down", changed, gpu)
    return None


def _shorter_rows(case: Case, gpu: Gpu) -> Idea | None:
    tokens = longest_that_fits(case, gpu)
    if not tokens or tokens >= case.settings.max_length:
        return None
    changed = case.with_settings(max_length=tokens)
    left_out = len(case.train) - len(changed.train)
    if left_out > len(changed.train):
        return None  # what is left is no longer the data set
    costs = f"{left_out:,} of {len(case.train):,} rows are too long for it (over_long)"
    return Idea(f"train.max_length: {tokens}", costs, changed, gpu, left_out)


def longest_that_fits(case: Case, gpu: Gpu) -> int:
    """Return the highest max_length, a multiple of STEP up to the run's own, with which the run fits; 0 if none does.

    Only lengths that leave a row to train on count.
    """
    low, high = 0, case.settings.max_length // STEP
    while low < high:
        middle = (low + high + 1) // 2
        changed = case.with_settings(max_length=middle * STEP)
        low, high = (middle, high) if share(changed, gpu) <= FITS else (low, middle - 1)
    return low * STEP if len(case.with_settings(max_length=low * STEP).train) else 0


def _more_gpus(case: Case, gpu: Gpu) -> Idea | None:
    nodes, processes = case.way.nodes, case.way.processes // case.way.nodes
    if ZERO3.name not in _supported(case):
        return None
    while (processes := processes * 2) <= MACHINE:
        changed = case.on_gpus(nodes, processes, ZERO3)
        if share(changed, gpu) <= FITS or processes * 2 > MACHINE:
            return _same_rows(case, changed, gpu, f"processes: {processes}", "more GPUs at a time")
    return None


def _more_nodes(case: Case, gpu: Gpu) -> Idea | None:
    """Return the run on more whole machines, where all GPUs of those that it has are not enough."""
    nodes, processes = case.way.nodes, max(MACHINE, case.way.processes // case.way.nodes)
    if ZERO3.name not in _supported(case) or processes % case.settings.sequence_parallel:
        return None
    if share(case.on_gpus(nodes, processes, ZERO3), gpu) <= FITS:
        return None
    while (nodes := nodes * 2) <= MACHINES:
        changed = case.on_gpus(nodes, processes, ZERO3)
        if share(changed, gpu) <= FITS:
            costs = "more machines of a cluster; weights cross the network between them for each pass"
            return _same_rows(case, changed, gpu, f"nodes: {nodes}, processes: {processes}", costs)
    return None


def _same_rows(case: Case, changed: Case, gpu: Gpu, what: str, costs: str) -> Idea:
    """Return the idea of training on more GPUs with zero3, with the same rows in a step if these can be divided."""
    what = f"{what}, strategy: {ZERO3.name}"
    passes = case.settings.gradient_accumulation_steps * case.way.processes / changed.way.processes
    if passes != int(passes) or passes < 1:
        return Idea(what, f"{costs}, more rows in a step", changed, gpu)
    changed = changed.with_settings(gradient_accumulation_steps=int(passes))
    return Idea(f"{what}, train.gradient_accumulation_steps: {int(passes)}", costs, changed, gpu)


def _other_product(case: Case, gpu: Gpu) -> Idea | None:
    for other in sorted(GPUS.values(), key=lambda one: one.memory):
        if other.memory > gpu.memory and share(case, other) <= FITS:
            return Idea(f"gpu: {other.name}", "another product", case, other)
    return None


TRAINING: tuple[Try, ...] = (
    _one_row,
    _checkpointing,
    _strategy("zero2", "gradients and optimizer are shared"),
    _strategy("fsdp2", "weights come from the other GPUs for each pass"),
    _strategy("zero3", "weights come from the other GPUs for each pass, while nothing is computed"),
    _four_bits,
    _strategy("zero2_offload", "the optimizer works on the CPU"),
    _strategy("zero3_offload", "slow: the weights come from main memory, and the optimizer works on the CPU"),
)
DATA: tuple[Try, ...] = (_smaller_pictures, _shorter_rows)
HARDWARE: tuple[Try, ...] = (_more_gpus, _more_nodes, _other_product)
"""All changes, the cheapest first: of the training, of the data, of the GPUs."""
