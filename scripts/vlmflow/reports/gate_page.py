"""The gate page: the results of the smoke run, and the estimate of the full run."""

from dataclasses import dataclass

from vlmflow.reports.lengths_page import LongRow, long_rows
from vlmflow.reports.page import Tile, render
from vlmflow.reports.run_history import MadeOf
from vlmflow.supervisor.report import Check, Gate


@dataclass(frozen=True)
class GatePage:
    """What the template `gate.html.jinja` shows."""

    run: str
    title: str
    subtitle: str
    tiles: list[Tile]
    checks: list[Check]
    longest: list[LongRow]
    made_of: MadeOf


def gate_page(run: str, gate: Gate, made_of: MadeOf) -> str:
    """Return the gate of a run (`gate.json`) as an HTML page: checks, figures, the estimate of the full run."""
    lengths = gate.lengths
    planned = f" Planned: {gate.plan.in_words()}." if gate.plan else ""
    page = GatePage(
        run,
        f"{run}: the gate is {'open' if gate.passed else 'closed'}",
        f"The full run: {gate.full_run.readable}.{planned}",
        [
            Tile("tokens per second", f"{gate.tokens_per_second:,}", "of the smoke run, all processes"),
            Tile("peak memory", f"{max(gate.peak_memory, default=0) // 1_000_000:,} MB", "of one process"),
            Tile("rows to train on", f"{lengths.rows:,}", "of the full run"),
            Tile("median row", f"{lengths.median:,}", "tokens"),
            Tile("longest row", f"{lengths.longest[0].tokens:,}", "tokens"),
            *([] if gate.without_adapter is None else [_without_adapter(gate.without_adapter)]),
        ],
        gate.checks,
        long_rows("train", lengths),
        made_of,
    )
    return render("gate.html.jinja", page)


def _without_adapter(share: float) -> Tile:
    return Tile("without adapter", f"{share:.0%}", "of the model's weights")
