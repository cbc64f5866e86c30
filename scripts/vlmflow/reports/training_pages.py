"""The pages of a training: that of the gate, and a run's page, while it runs and at its end.

The run's page is `run.html` in the run folder while the training runs. At the end it is `reports/run-RUN.html`, with
what was estimated before it beside what it measured.
"""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import log
from vlmflow.core.files import write_text
from vlmflow.core.progress import LOG_INTERVAL, clock
from vlmflow.estimate.account import Compared, NoEstimate, Result, compare, nearest
from vlmflow.in_trainer.messages import Begin, Event, Log, new_events
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.reports.charts import Curve, LineChart, line_chart
from vlmflow.reports.former_trainings import MadeOf, former_trainings
from vlmflow.reports.page import gigabytes, render
from vlmflow.supervisor.progress import Doing, Newest, doing
from vlmflow.supervisor.report import Gate, TrainingReport
from vlmflow.supervisor.run_folder import RunFolder


def gate_page(run: str, gate: Gate, made_of: MadeOf) -> str:
    """Return the gate of a run (`gate.json`) as an HTML page: checks, figures, the estimate of the full run."""
    longest = [("train", row, None) for row in gate.lengths.longest]
    return render("gate.html.jinja", run=run, gate=gate, made_of=made_of, longest=longest)


class RunHistory:
    """The course of a training, updated from one event at a time; steps that a resumed training repeats count once.

    Besides what the trainer logs it has two curves. speed: tokens per second of each step. waiting: the share of a
    step's time in which rank 0 waited for data.
    """

    def __init__(self) -> None:
        self.newest = Newest()
        self._curves = {name: Curve() for name in (*LOGGED, "speed", "waiting")}
        self._tokens = 0

    def take(self, event: Event) -> None:
        """Add one more event."""
        if isinstance(event, Begin):
            self._tokens = event.tokens
            for curve in self._curves.values():
                curve.cut(event.step)
        elif isinstance(event, Log):
            self._log(event)
        self.newest.take(event)

    def _log(self, event: Log) -> None:
        for name in LOGGED:
            if (value := getattr(event, name)) is not UNSET:
                self._curves[name].add(event.step, value)
        seconds = event.time - self.newest.time
        if event.loss is not UNSET and seconds > 0:
            self._curves["speed"].add(event.step, (event.tokens - self._tokens) / seconds)
            if event.waited is not UNSET:
                share = (event.waited - (self.newest.waited or 0.0)) / seconds
                self._curves["waiting"].add(event.step, min(1.0, max(0.0, share)))
        self._tokens = event.tokens

    def charts(self) -> list[LineChart]:
        """Return the charts of all figures that have a value."""
        steps, curves = self.newest.target, self._curves
        losses = {"train": curves["loss"], "val": curves["eval_loss"]}
        charts = [
            line_chart("Loss", "nats per token", losses, steps),
            line_chart("Learning rate", "learning rate", {"train": curves["learning_rate"]}, steps),
            line_chart("Gradient norm", "norm before clipping", {"train": curves["grad_norm"]}, steps),
            line_chart("Speed", "tokens per second, of all processes", {"train": curves["speed"]}, steps),
            line_chart(
                "Waiting for data", "share of a step's time", {"train": curves["waiting"]}, steps, "{:.0%}".format
            ),
        ]
        return [chart for chart in charts if chart]

    @property
    def lowest(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss; None without one. NaN is not lower."""
        losses = self.newest.eval_losses.items()
        return min(losses, key=lambda entry: entry[1] if entry[1] == entry[1] else float("inf"), default=None)


LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")
"""The figures of a trainer's log that have a curve."""

MOST_TIME = 0.01
"""The share of the time that writing the page may take: a page that takes long is written less often."""


class LivePage:
    """The page of one training; `refresh` is its onlooker (`supervisor.watch`).

    run: the run's name. stage: "smoke" or "full". settings: the training's. every: seconds between two pages.
    """

    def __init__(self, run: str, stage: str, settings: TrainSettings, every: float = LOG_INTERVAL) -> None:
        self._run, self._stage, self._settings, self._every = run, stage, settings, every
        self._history = RunHistory()
        self._read = 0
        self._sessions: int | None = None
        self._due = 0.0
        self._failed = False

    def refresh(self, folder: RunFolder, runs: bool) -> None:
        """Write the page, if it is time to, or the trainers ended (runs is False).

        A page that cannot be made or written is reported once, as a warning; it ends no training.
        """
        begun = time.monotonic()
        if runs and begun < self._due:
            return
        try:
            self._write(folder, runs)
        except Exception as error:
            if not self._failed:
                log.warning(f"{folder.page} cannot be written, the training goes on: {type(error).__name__}: {error}")
            self._failed = True
        self._due = time.monotonic() + max(self._every, (time.monotonic() - begun) / MOST_TIME)

    def _write(self, folder: RunFolder, runs: bool) -> None:
        if folder.progress.exists():
            with folder.progress.open("rb") as lines:
                lines.seek(self._read)  # the file of a long training is large
                for event in new_events(lines):
                    self._history.take(event)
                self._read = lines.tell()
        newest = self._history.newest
        if self._sessions is None:
            self._sessions = newest.sessions
        now = doing(newest, self._settings, folder.output, runs, begun=newest.sessions > self._sessions)
        if not runs:
            self._sessions = None
        written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        every = max(1, round(self._every))
        write_text(folder.page, live_page(self._run, self._stage, self._history, now, written, every))


def live_page(run: str, stage: str, history: RunHistory, doing: Doing, now: str, every: int) -> str:
    """Return the page of a training as it is now.

    stage: "smoke" or "full". now: date and time for people. every: seconds between two pages while it runs.
    """
    return render(
        "run.html.jinja",
        run=run,
        stage=stage,
        history=history,
        doing=doing,
        now=now,
        refresh=every if doing not in ("ended", "interrupted") else None,
        report=None,
    )


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
    return render(
        "run.html.jinja",
        run=run,
        stage="full",
        history=history,
        doing="ended",
        refresh=None,
        report=report,
        schedule=schedule_in_words(report.steps, len(report.eval_losses)),
        made_of=made_of,
        comparisons=comparisons(gate, report, smoke, estimate),
        difference_of=difference_of,
        form_of=lambda unit: FORMS.get(unit, "{:,.0f}".format),
        former=former_trainings(stage, report),
        store=stage,
    )


FORMS: dict[str, Callable[[float], str]] = {
    "bytes": gigabytes,
    "hours": "{:,.2f} h".format,
    "seconds": clock,
    "tokens/s": "{:,.1f} tokens/s".format,
    "per second": "{:,.1f}".format,
}
"""How figures are written, by their unit; others are whole numbers."""


def comparisons(
    gate: Gate, report: TrainingReport, smoke: TrainingReport, estimate: Result
) -> dict[str, list[Compared]]:
    """Return what was estimated beside what was measured.

    gate: by the gate, and by the full run. smoke, full: before a GPU was asked for, and by that training.
    """
    memory, measured = (max(sizes, default=None) for sizes in (gate.peak_memory, report.peak_memory))
    rows = {
        "gate": [
            Compared("optimizer steps", "steps", gate.full_run.steps, report.steps),
            Compared("tokens trained on", "tokens", gate.full_run.tokens, report.tokens),
            Compared("time in steps and evaluations", "seconds", gate.full_run.seconds, report.seconds),
            Compared("tokens per second", "per second", gate.tokens_per_second, report.tokens_per_second),
            Compared("peak memory of a process", "bytes", memory, measured),
        ]
    }
    if not isinstance(estimate, NoEstimate):
        rows |= {"smoke": compare(estimate, smoke), "full": compare(estimate, report)}
    return {stage: compared for stage, compared in rows.items() if compared}


def difference_of(compared: Compared) -> str:
    """Return how much more was measured than estimated, in percent of the estimate or of a range's nearer end.

    "" if that is unknown.
    """
    estimated, measured = compared.estimated, compared.measured
    if not estimated or measured is None:
        return ""
    text = f"{measured / nearest(measured, estimated, compared.up_to) - 1:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text
