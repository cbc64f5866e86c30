"""What was estimated before a training, compared with what it measured: sections of a run's page."""

from collections.abc import Callable
from dataclasses import dataclass

from vlmflow.core.progress import clock
from vlmflow.estimate import compare as estimated
from vlmflow.estimate.accounts import NoEstimate, Result
from vlmflow.estimate.compare import compare, nearest
from vlmflow.supervisor.accounts import Gate, TrainingReport


@dataclass(frozen=True)
class Compared:
    """One figure, estimated and measured; None where it is unknown.

    form: how a value is written. up_to: the upper end, where the estimate is a range.
    """

    name: str
    estimated: float | None
    measured: float | None
    form: Callable[[float], str] = "{:,.0f}".format
    up_to: float | None = None

    @property
    def texts(self) -> tuple[str, str]:
        """Both values for people."""
        values = (self.estimated, self.measured, self.up_to)
        estimated, measured, up_to = ("–" if one is None else self.form(one) for one in values)
        return estimated if self.up_to is None else f"{estimated} to {up_to}", measured

    @property
    def difference(self) -> str:
        """How much more was measured than estimated, in percent of the estimate or of a range's nearer end.

        "" if that is unknown.
        """
        if not self.estimated or self.measured is None:
            return ""
        text = f"{self.measured / nearest(self.measured, self.estimated, self.up_to) - 1:+.1%}"
        return "0.0%" if text in ("+0.0%", "-0.0%") else text


@dataclass(frozen=True)
class Comparison:
    """A section of the page."""

    title: str
    text: str
    rows: list[Compared]


def comparisons(gate: Gate, report: TrainingReport, smoke: TrainingReport, estimate: Result) -> list[Comparison]:
    """Return the sections of a run's page that compare what was estimated with the reports of smoke and full run."""
    text = "What the gate estimated from the smoke run, and what the full run measured."
    if report.ended_early:
        text += " The full run ended early: the gate estimates a run up to its last step."
    found = [Comparison("The gate against the full run", text, gate_against_full(gate, report))]
    if isinstance(estimate, NoEstimate):
        return found
    for title, measured in (("smoke", smoke), ("full", report)):
        text = f"What was estimated before a GPU was asked for, and what the {title} run measured."
        rows = [_of_estimate(one) for one in compare(estimate, measured)]
        if rows:
            found.append(Comparison(f"The estimate against the {title} run", text, rows))
    return found


def _of_estimate(one: estimated.Compared) -> Compared:
    forms = {"bytes": gigabytes, "hours": "{:,.2f} h".format, "tokens/s": "{:,.1f} tokens/s".format}
    return Compared(one.name, one.estimated, one.measured, forms.get(one.unit, "{:,.0f}".format), one.up_to)


def gate_against_full(gate: Gate, report: TrainingReport) -> list[Compared]:
    """Compare the gate's estimate with the report of the full run."""
    full = gate.full_run
    return [
        Compared("optimizer steps", full.steps, report.steps),
        Compared("tokens trained on", full.tokens, report.tokens),
        Compared("time in steps and evaluations", full.seconds, report.seconds, clock),
        Compared("tokens per second", gate.tokens_per_second, report.tokens_per_second, "{:,.1f}".format),
        Compared(
            "peak memory of a process",
            max(gate.peak_memory, default=None),
            max(report.peak_memory, default=None),
            gigabytes,
        ),
    ]


def gigabytes(number: float) -> str:
    """Format bytes for people."""
    return f"{number / 1e9:,.1f} GB"
