"""Warns before a run that may not fit its GPU, and refuses one that does not."""

import logging

from msgspec.structs import asdict

from vlmflow.config.gpus import GPUS
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.estimate.accounts import Change, Estimate, Memory
from vlmflow.estimate.changes import FITS, REFUSED

log = logging.getLogger("vlmflow")

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
    found = f"{needed}, {on.memory_share:.0%} of {gpu.title}'s {gpu.memory / GB:.0f} GB"
    if on.memory_share <= FITS:
        return found
    return f"{found}: {', '.join(f'{name} {size / GB:.1f}' for name, size in parts_of(estimate.memory))}"


def judge(estimate: Estimate, run: str, *, on_gpu: bool, ignored: bool) -> None:
    """Log the estimate of a run's memory; warn above FITS of its GPU's memory.

    on_gpu: whether it trains on GPUs; on the CPU nothing is refused. ignored: whether the run starts in any case
    (`runs.NAME.estimate: ignore`).

    Raises VlmflowError above REFUSED, with the parts and what would make it fit.
    """
    found, on = in_words(estimate, run, on_gpu=on_gpu), estimate.on(estimate.gpu)
    if not on_gpu or on is None or on.memory_share <= FITS:
        log.info(found)
        return
    if on.memory_share > REFUSED and not ignored:
        raise VlmflowError(
            found,
            f"{advice(estimate.changes)}; reports/estimate-{run}.html has all figures; to start it in any case, set "
            "runs.NAME.estimate: ignore",
        )
    log.warning(f"{found}. It may not fit; {advice(estimate.changes)}")


def advice(changes: list[Change]) -> str:
    """Return what would make a run fit, in one line, the cheapest first."""
    fitting = [one for one in changes if one.fits][:NAMED]
    if not fitting:
        return "no change that was tried makes it fit: take a smaller model or a GPU with more memory"
    return "cheapest first: " + "; or ".join(map(_with_figures, fitting))


def _with_figures(one: Change) -> str:
    left_out = f", {one.rows_left_out:,} rows left out" if one.rows_left_out else ""
    return f"{one.what} ({one.memory / GB:.1f} GB{left_out})"
