"""A run's page: the course of a training, and at its end what was estimated before it beside what it measured.

It is `run.html` in the run folder while the training runs, and `reports/run-RUN.html` at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.core.errors import counted
from vlmflow.core.progress import clock
from vlmflow.estimate import account as estimated
from vlmflow.estimate.account import NoEstimate, Result, compare, nearest
from vlmflow.in_trainer.messages import Event
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.reports.charts import LineChart, short
from vlmflow.reports.page import Tile, render
from vlmflow.reports.run_history import FormerTraining, MadeOf, RunHistory, former_trainings
from vlmflow.supervisor.progress import Doing, Newest
from vlmflow.supervisor.report import Gate, TrainingReport

SENTENCES: dict[Doing, str] = {
    "starting": "The trainers load the model.",
    "training": "Step {step:,} of {target:,} is done.",
    "evaluating": "Step {step:,} of {target:,} is done; the validation loss follows.",
    "saving": "Step {step:,} of {target:,} is done; its checkpoint is being saved.",
    "ended": "Step {step:,} of {target:,} was the last one.",
    "interrupted": "Step {step:,} of {target:,} was done. The same command resumes from the newest checkpoint; the "
    "stage's log says at its end why the training ended.",
}


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


@dataclass(frozen=True)
class RunPage:
    """The page's facts.

    stage: "smoke" or "full". refresh: after how many seconds the page loads itself again; None: never. share: of the
    steps that are done, 0 to 1. former: the run's former trainings, which are in `store`.
    """

    title: str
    subtitle: str
    stage: str
    doing: Doing
    sentence: str
    share: float
    tiles: list[Tile]
    charts: list[LineChart]
    refresh: int | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    made_of: MadeOf | None = None
    former: list[FormerTraining] = field(default_factory=list)
    store: str = ""


def live_page(run: str, stage: str, history: RunHistory, doing: Doing, now: str, every: int) -> str:
    """Return the page of a training as it is now.

    stage: "smoke" or "full". now: date and time for people. every: seconds between two pages while it runs.
    """
    newest, runs = history.newest, doing not in ("ended", "interrupted")
    again = f" This page loads itself again every {every} s." if runs else ""
    page = RunPage(
        title=_title(run, stage, newest),
        subtitle=f"Written at {now}.{again}",
        stage=stage,
        doing=doing,
        sentence=SENTENCES[doing].format(step=newest.step, target=newest.target),
        share=_share(newest),
        tiles=_tiles(newest, runs, _memory(newest.memory, "of rank 0 so far")),
        charts=history.charts(),
        refresh=every if runs else None,
    )
    return render("run.html.jinja", page)


def run_page(
    run: str,
    events: list[Event],
    report: TrainingReport,
    gate: Gate,
    smoke: TrainingReport,
    estimate: Result,
    made_of: MadeOf,
    stage: Path,
) -> str:
    """Return the page of a finished full run.

    events: all of its events. report: its report. gate, smoke: the gate before it, and the report of the smoke run.
    estimate: what was estimated before both. stage: the folder of the run folders of its full trainings.
    """
    history = RunHistory()
    for event in events:
        history.take(event)
    early = ", early: validation loss no longer fell" if report.ended_early else ""
    memory = max(report.peak_memory, default=None)
    planned = f" Planned: {report.plan.in_words()}." if report.plan else ""
    page = RunPage(
        title=_title(run, "full", history.newest),
        subtitle=f"{counted(report.world_size, 'process')} on {report.device}; strategy {report.strategy}.{planned}",
        stage="full",
        doing="ended",
        sentence=f"The training ended at step {report.steps:,} of {report.target:,}{early}. "
        f"The best checkpoint is that of step {report.best.step:,}: "
        f"{schedule_in_words(report.steps, len(report.eval_losses))}.",
        share=_share(history.newest),
        tiles=_tiles(history.newest, False, _memory(memory, "of one process")),
        charts=history.charts(),
        comparisons=comparisons(gate, report, smoke, estimate),
        made_of=made_of,
        former=former_trainings(stage, report),
        store=str(stage),
    )
    return render("run.html.jinja", page)


def _title(run: str, stage: str, newest: Newest) -> str:
    at = f", step {newest.step:,} of {newest.target:,}" if newest.target else ""
    return f"{run}: {stage} run{at}"


def _share(newest: Newest) -> float:
    return newest.step / newest.target if newest.target else 0.0


def _tiles(newest: Newest, runs: bool, memory: list[Tile]) -> list[Tile]:
    """Return the tiles of all figures that have a value. memory: that of the memory, if known."""
    tiles = []
    if runs and newest.seconds_left is not None:
        tiles.append(Tile("time left", clock(newest.seconds_left), f"at {newest.seconds_per_step:.2f} s per step"))
    tiles.append(Tile("time", clock(newest.seconds), "in steps and evaluations"))
    if newest.loss is not None:
        tiles.append(Tile("loss", f"{newest.loss:.3f}", "of the newest step, nats per token"))
    if newest.eval_losses:
        step, loss = min(newest.eval_losses.items(), key=_loss)
        note = f"of step {max(newest.eval_losses):,}; lowest {loss:.3f}, at step {step:,}"
        tiles.append(Tile("validation loss", f"{newest.eval_loss:.3f}", note))
    if newest.learning_rate is not None:
        tiles.append(Tile("learning rate", f"{newest.learning_rate:.2g}", "of the newest step"))
    if newest.grad_norm is not None:
        tiles.append(Tile("gradient norm", short(newest.grad_norm), "of the newest step"))
    if newest.seconds:
        tiles.append(Tile("tokens per second", f"{newest.tokens / newest.seconds:,.0f}", "of all processes"))
    if newest.waited is not None and newest.time:
        tiles.append(Tile("waiting for data", f"{newest.waited / newest.time:.1%}", "of this session's time, rank 0"))
    sessions = Tile("sessions", f"{newest.sessions:,}", f"the newest began at step {newest.begun_at:,}")
    return [*tiles, *memory, sessions]


def _memory(most: int | None, whose: str) -> list[Tile]:
    return [] if most is None else [Tile("peak memory", gigabytes(most), whose)]


def _loss(entry: tuple[int, float]) -> float:
    loss = entry[1]
    return loss if loss == loss else float("inf")  # NaN is not lower


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
