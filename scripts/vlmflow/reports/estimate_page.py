"""The estimate page: the memory, time, price and disk that a run needs, and what would make it fit."""

from dataclasses import dataclass, field

from vlmflow.config.gpus import GPUS
from vlmflow.config.run_blocks import EstimateBlock
from vlmflow.core.errors import counted
from vlmflow.estimate.account import Change, Estimate, NoEstimate, OnProduct, Result
from vlmflow.estimate.changes import FITS, GB, REFUSED, parts_of, spread_of
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.reports.page import Tile, gb_or_mb, render

STATES = {
    "good": ("fits", "It fits", ""),
    "maybe": ("may fit", "It may not fit", " The run starts, with a warning."),
    "bad": ("does not fit", "It does not fit", " The run stops before it asks for a GPU."),
}
"""Of each state of a product: a word, the beginning of a sentence, and what follows for the run that names it."""


@dataclass(frozen=True)
class Product:
    """A row of the table of products. state: "good", "maybe" or "bad". chosen: the run's own product."""

    title: str
    memory: str
    share: float
    state: str
    verdict: str
    hours: str
    shares: str
    price: str
    chosen: bool


@dataclass(frozen=True)
class EstimatePage:
    """The page's facts. verdict: one sentence; state: of that ("good", "maybe", "bad"), empty without a product.

    parts: of the memory, each with its bytes; memory: their sum. disk: what is kept there, each with its bytes.
    """

    title: str
    subtitle: str
    verdict: str
    state: str
    tiles: list[Tile] = field(default_factory=list)
    memory: int = 0
    parts: list[tuple[str, int]] = field(default_factory=list)
    between: str = ""
    products: list[Product] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    disk: list[tuple[str, int]] = field(default_factory=list)


def estimate_page(run: str, found: Result, settings: EstimateBlock) -> str:
    """Return `reports/estimate-RUN.html`. found: the estimate, or why there is none. settings: those of the run."""
    if isinstance(found, NoEstimate):
        page = EstimatePage(
            f"{run}: no estimate", "The smoke run shows whether the longest rows fit.", found.reason, ""
        )
    else:
        page = _page(run, found, settings)
    return render("estimate.html.jinja", page)


def _page(run: str, found: Estimate, settings: EstimateBlock) -> EstimatePage:
    state, verdict = _verdict(found, settings)
    host, network = found.memory.host, f", at {settings.network_gbit:g} Gbit/s between nodes" if found.nodes > 1 else ""
    return EstimatePage(
        f"{run}: what it needs",
        f"{found.weights / 1e9:.3g} billion weights; {found.trained / 1e6:,.1f} million are trained, with "
        f"strategy {settings.strategy} and {counted(found.processes, 'process')}{spread_of(found)}{network}. "
        + " ".join(["Arithmetic before the run, not measured.", *(f"Assumed: {note}." for note in found.notes)]),
        verdict,
        state,
        _tiles(found),
        found.memory.total,
        parts_of(found.memory),
        f"Main memory for offload: {gb_or_mb(host)} for each process." if host else "",
        [_product(one, found) for one in found.products],
        sorted(found.changes, key=lambda one: not one.fits),
        [
            ("base model", found.disk.model),
            ("merged model", found.disk.merged),
            ("one checkpoint", found.disk.checkpoint),
            ("all checkpoints at a time, with one being written", found.disk.checkpoints),
        ],
    )


def _tiles(found: Estimate) -> list[Tile]:
    on = found.on(found.gpu)
    tiles = [
        Tile("memory of one GPU", gb_or_mb(found.memory.total), "at the worst moment of a step"),
        Tile("optimizer steps", f"{found.steps:,}", f"{found.rows:,} rows, {found.tokens:,} tokens"),
        Tile("longest row", f"{found.longest:,}", "tokens, of those that fit max_length"),
        Tile("operations", f"{found.flops:.2g}", "floating-point, evaluations included"),
    ]
    if found.micro_batch_tokens:
        saved = f"; one row each: {found.one_row_each:.1f} times as long" if found.one_row_each else ""
        again = "with" if found.gradient_checkpointing else "without"
        note = f"tokens in one pass, {again} gradient_checkpointing{saved}"
        tiles.append(Tile("micro-batch", f"{found.micro_batch_tokens:,}", note))
    if found.evaluations:
        said = schedule_in_words(found.steps, found.evaluations)
        tiles.append(Tile("evaluations", f"{found.evaluations:,}", said))
    if on:
        time = _hours(on.fast.seconds, on.slow.seconds)
        tiles.append(Tile("time", time, f"evaluations: {on.slow.evaluation_share:.0%} of it"))
        if on.slow_comparison:
            time = _hours(on.fast_comparison, on.slow_comparison)
            tiles.append(Tile("comparison with the base", time, "after the training, without loading the models"))
    if on and on.fast_price is not None:
        tiles.append(Tile("price", _price(on), "of all GPUs"))
    return tiles


def _verdict(found: Estimate, settings: EstimateBlock) -> tuple[str, str]:
    if settings.device == "cpu":
        return "", "It trains on the CPU: nothing is compared with a GPU's memory."
    on = found.on(found.gpu)
    if on is None:
        return "", "The run names no GPU product (gpu): the table shows on which ones it fits."
    gpu = GPUS[on.gpu]
    state = _state(on.memory_share)
    _, outcome, follows = STATES[state]
    needed = f"{outcome} {gpu.title}: {on.memory_share:.0%} of its {gpu.memory / GB:.0f} GB."
    ignored = state != "good" and settings.estimate == "ignore"
    return state, needed + (" It starts in any case (estimate: ignore)." if ignored else follows)


def _state(share: float) -> str:
    return "good" if share <= FITS else "maybe" if share <= REFUSED else "bad"


def _product(one: OnProduct, found: Estimate) -> Product:
    state = _state(one.memory_share)
    gpu = GPUS[one.gpu]
    nodes = f"{found.nodes} × " if found.nodes > 1 else ""
    return Product(
        title=f"{nodes}{found.processes // found.nodes} × {gpu.title}",
        memory=gb_or_mb(gpu.memory),
        share=one.memory_share,
        state=state,
        verdict=STATES[state][0],
        hours=_hours(one.fast.seconds, one.slow.seconds),
        shares=f"{100 * gpu.shares[1]:.0f} to {100 * gpu.shares[0]:.0f} %{'' if gpu.measured else ', not measured'}",
        price=_price(one) if one.fast_price is not None else "",
        chosen=one.gpu == found.gpu,
    )


def _hours(fast: float, slow: float) -> str:
    if slow < 60:
        return "less than a minute"
    if slow < 3600:
        return f"{fast / 60:.1f} to {slow / 60:.1f} min"
    return f"{fast / 3600:,.1f} to {slow / 3600:,.1f} h"


def _price(on: OnProduct) -> str:
    digits = 2 if (on.slow_price or 0) < 10 else 0
    return f"{on.fast_price:,.{digits}f} to {on.slow_price:,.{digits}f}"
