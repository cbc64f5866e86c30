"""What was estimated before a training, compared with what it measured: sections of a run's page."""

from collections.abc import Callable
from dataclasses import dataclass

from vlmflow.core.progress import clock
from vlmflow.training.accounts import Gate, TrainingReport


@dataclass(frozen=True)
class Compared:
    """One figure, estimated and measured; None where it is unknown. form: how a value is written."""

    name: str
    estimated: float | None
    measured: float | None
    form: Callable[[float], str] = "{:,.0f}".format

    @property
    def texts(self) -> tuple[str, str]:
        """Both values for people."""
        estimated, measured = ("–" if one is None else self.form(one) for one in (self.estimated, self.measured))
        return estimated, measured

    @property
    def difference(self) -> str:
        """How much more was measured than estimated, in percent of the estimate; "" if that is unknown."""
        if not self.estimated or self.measured is None:
            return ""
        return f"{self.measured / self.estimated - 1:+.1%}"


@dataclass(frozen=True)
class Comparison:
    """A section of the page."""

    title: str
    text: str
    rows: list[Compared]


def comparisons(gate: Gate, report: TrainingReport) -> list[Comparison]:
    """Return the sections of a run's page that compare estimates with the full run's report."""
    text = "What the gate estimated from the smoke run, and what the full run measured."
    if report.ended_early:
        text += " The full run ended early: the gate estimates a run up to its last step."
    return [Comparison("The gate against the full run", text, gate_against_full(gate, report))]


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
