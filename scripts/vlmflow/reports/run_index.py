"""The index of a working directory, `reports/index.html`: what every run has made so far, with links to its pages.

It reads what other processes may be writing, and what a job may have damaged: a file that cannot be read is one line in
its run's row, and ends nothing.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from vlmflow.config.run_blocks import own_settings
from vlmflow.config.settings import is_name
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted, printable
from vlmflow.core.progress import clock
from vlmflow.evaluation.report import AnswerReport, EvaluationReport
from vlmflow.evaluation.verdict import REPORT
from vlmflow.fetch.placed import model_with
from vlmflow.lengths.summary import FittedRows, LengthSummary
from vlmflow.merging.proof import PROOF, Proof
from vlmflow.reports.eval_figures import colour_of
from vlmflow.reports.page import render
from vlmflow.reports.run_history import FormerTraining, MadeOf, former_trainings, settings_of
from vlmflow.reports.summary import proven_weights
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport

T = TypeVar("T")

PER_RUN = ("lengths", "fitted", "checkpoints", "verified", "merged", "eval", "answers")
"""The folders of targets in which a run has a folder of its name."""

NEVER_WRITTEN = (ArithmeticError, LookupError, ValueError)
"""What a figure that no stage writes may raise when it is shown."""


@dataclass(frozen=True)
class Link:
    """A link. address: relative to the page."""

    text: str
    address: str


@dataclass(frozen=True)
class Cell:
    """What one stage made for one run. badge: the result in a word or two; state: its class in the page."""

    badge: str = ""
    state: str = "own"
    lines: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One run: its name, a cell for each of `COLUMNS`, and by column why it could not be read.

    of: lines on its model, and its settings that differ from the defaults. former: its former full trainings; their run
    folders are in `store`.
    """

    run: str
    cells: list[Cell]
    faults: list[tuple[str, str]]
    of: list[str]
    former: list[FormerTraining]
    store: str


@dataclass(frozen=True)
class IndexPage:
    """What the template `index.html.jinja` shows."""

    title: str
    subtitle: str
    columns: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Run:
    """A run's files. folder: the working directory. store: stores.runs. pages: the folder of the index, for links.

    made_of: what the configuration trains it from, if that has it.
    """

    name: str
    folder: Path
    store: Path
    pages: Path
    made_of: MadeOf | None

    @cached_property
    def report(self) -> TrainingReport | None:
        """The report of the finished training; None without one."""
        account = self.folder / "checkpoints" / self.name / "full" / "report.json"
        return read_account(account, TrainingReport) if account.is_file() else None

    def links(self, *pages: tuple[str, Path | None]) -> list[Link]:
        """Return links to those of the pages that exist, by their texts."""
        return [Link(text, _address(page, self.pages)) for text, page in pages if page and page.is_file()]

    def page(self, name: str) -> Path:
        """Return the place of a page among the reports."""
        return self.folder / "reports" / f"{name}.html"

    def newest(self, file: str) -> Path | None:
        """Return the newest file of this name in the run folders of a stage ("full/*/run.html"); None without one."""
        return max((self.store / self.name).glob(file), key=lambda found: found.stat().st_mtime, default=None)


def index_page(folder: Path, store: Path, page: Path, configured: Mapping[str, MadeOf], now: str) -> tuple[str, int]:
    """Return the page, and how many runs it has.

    folder: the working directory. store: the folder of all run folders (stores.runs). page: the file that it becomes;
    links are relative to it. configured: what each run of the configuration is made of; runs found in `folder` are
    added. now: date and time for people.
    """
    names = sorted({*configured, *_found(folder, store)})
    runs = [Run(name, folder, store, page.parent, configured.get(name)) for name in names]
    rows = [_row(run) for run in runs]
    where = printable(folder.resolve().name)
    facts = IndexPage(f"{where}: {counted(len(rows), 'run')}", f"Written at {now} by make index.", list(COLUMNS), rows)
    return render("index.html.jinja", facts), len(rows)


def _found(folder: Path, store: Path) -> Iterable[str]:
    for place in [*(folder / name for name in PER_RUN), store]:
        if place.is_dir():
            yield from (found.name for found in place.iterdir() if is_name(found.name) and found.is_dir())


def _row(run: Run) -> Row:
    cells: list[Cell] = []
    faults: dict[str, str] = {}

    def tried(column: str, read: Callable[[Run], T], without: T) -> T:
        try:
            return read(run)
        except (VlmflowError, OSError, *NEVER_WRITTEN) as error:
            cause = error.cause if isinstance(error, VlmflowError) else f"{type(error).__name__}: {error}"
            faults.setdefault(printable(" ".join(cause.split())), column)  # two columns may read the same file
            return without

    for column, read in COLUMNS.items():
        cell = tried(column, read, Cell())
        cells.append(replace(cell, badge=printable(cell.badge), lines=[printable(line) for line in cell.lines]))
    of: list[str] = tried("full run", _of, [])
    former: list[FormerTraining] = tried("full run", _former, [])
    told = [(column, cause) for cause, column in faults.items()]
    return Row(run.name, cells, told, of, former, str(run.store / run.name / "full"))


def _former(run: Run) -> list[FormerTraining]:
    return former_trainings(run.store / run.name / "full", run.report)


def _of(run: Run) -> list[str]:
    """Return lines on model and settings: those of the finished training, else those of the configuration."""
    report = run.report
    if report:
        model = model_with(run.folder / "models", report.digests.model)
        source, settings = (model[1].source if model else ""), own_settings(settings_of(report))
    elif run.made_of:
        source, settings = run.made_of.model, run.made_of.settings
    else:
        return []
    told = ", ".join(f"{key} {value}" for key, value in settings)
    lines = [f"model {source}" if source else "", f"settings: {told or 'all are the defaults'}"]
    return [printable(line) for line in lines if line]


def _data(run: Run) -> Cell:
    dataset, account = run.made_of.dataset if run.made_of else None, run.folder / "fitted" / run.name / "account.json"
    if dataset is None and account.is_file():
        dataset = read_account(account, FittedRows).dataset
    if dataset is None:
        return Cell()
    if not is_name(dataset):
        raise ValueError(f"{account}: {dataset!r} is not the name of a data set")
    stats = run.folder / "data" / dataset / "stats.json"
    lines = [dataset]
    if stats.is_file():
        facts = read_account(stats, Stats)
        lines.append("rows: " + ", ".join(f"{count:,} {split}" for split, count in facts.examples.items()))
        lines.append(f"{sum(sum(one.rejects.values()) for one in facts.splits.values()):,} rejected")
    counts = run.folder / "data" / dataset / "counts.html"
    return Cell(lines=lines, links=run.links(("data", run.page(f"data-{dataset}")), ("counts", counts)))


def _lengths(run: Run) -> Cell:
    summary, account = run.folder / "lengths" / run.name / "summary.json", run.folder / "fitted" / run.name
    lines = []
    if summary.is_file():
        train = read_account(summary, LengthSummary).train
        longest = max((row.tokens for row in train.longest), default=0)
        lines.append(f"median {train.median:,}, longest {longest:,} tokens")
    if (account / "account.json").is_file():
        fitted = read_account(account / "account.json", FittedRows)
        left_out = sum(split.left_out for split in fitted.splits.values())
        lines.append(f"max_length {fitted.max_length:,}; {left_out:,} left out")
    pages = ("lengths", run.page(f"lengths-{run.name}")), ("estimate", run.page(f"estimate-{run.name}"))
    return Cell(lines=lines, links=run.links(*pages))


def _gate(run: Run) -> Cell:
    """Return the gate's result; that of a closed gate is in its run folder alone."""
    finished = run.folder / "checkpoints" / run.name / "smoke"
    account = finished / "gate.json" if (finished / "gate.json").is_file() else run.newest("smoke/*/gate.json")
    links = run.links(("gate", finished / "gate.html"), ("smoke run", run.newest("smoke/*/run.html")))
    if account is None:
        return Cell(links=links)
    gate = read_account(account, Gate)
    failed = [check.check for check in gate.checks if not check.passed]
    lines = [f"failed: {'; '.join(failed)}"] if failed else [f"{len(gate.checks)} checks passed"]
    badge, state = ("gate open", "good") if gate.passed else ("gate closed", "bad")
    return Cell(badge, state, lines, links)


def _training(run: Run) -> Cell:
    report, live = run.report, run.newest("full/*/run.html")
    if report is None:
        begun = Cell("training not finished", "maybe", [], run.links(("training", live)))
        return begun if live else Cell()
    early = f" of {report.target:,}, ended early" if report.ended_early else ""
    where = counted(report.world_size, "CPU process" if report.device == "cpu" else "GPU")
    lines = [f"{report.steps:,} steps{early}"]
    if isinstance(report.losses, list) and report.losses:
        lines.append(f"loss {report.losses[-1][1]:.3f}")
    lines.append(f"validation loss {report.best.eval_loss:.3f}, at step {report.best.step:,}")
    lines.append(f"time {clock(report.seconds)}, on {where}")
    return Cell("trained", "good", lines, run.links(("training", run.page(f"run-{run.name}"))))


def _verification(run: Run) -> Cell:
    proof, card = run.folder / "verified" / run.name / PROOF, run.folder / "merged" / run.name / "README.md"
    links = run.links(("model card", card))
    if not proof.is_file():
        return Cell(links=links)
    checks = read_account(proof, Proof).checks
    logits = f"logits: {checks.logits.verdict}" if checks.logits else "logits not compared"
    return Cell("proven", "good", [f"{checks.tensors.tensors:,} tensors", logits], links)


def _evaluation(run: Run) -> Cell:
    """Return the verdict on val, or that on test without one, and the figures of both."""
    links = run.links(("evaluation", run.page(f"eval-{run.name}")))
    reports = [run.folder / "eval" / run.name / split / REPORT for split in ("val", "test")]
    found = [read_account(report, EvaluationReport) for report in reports if report.is_file()]
    if not found:
        return Cell("not evaluated", links=links)
    if any(_of_other_weights(run, one.tuned.digest) for one in found):
        return Cell("of other weights", "bad", ["evaluate again"], links)
    lines = [
        f"{one.split}: {one.verdict}, {one.rows:,} rows"
        + (", costs first answers" if one.costs_first_answers else "")
        + (f", look {one.looks:,}" if one.looks else "")
        for one in found
    ]
    return Cell(found[0].verdict, colour_of(found[0]), lines, links)


def _answers(run: Run) -> Cell:
    """Return how often the tuned model and its base answer rightly on val: at first, and after one round of feedback.

    Later rounds are those of fewer rows, and do not compare.
    """
    file = run.folder / "answers" / run.name / "val" / REPORT
    if not file.is_file():
        return Cell("not asked")
    report = read_account(file, AnswerReport)
    if _of_other_weights(run, report.tuned.digest):
        return Cell("of other weights", "bad", ["ask again"])
    shown = report.all[:2] if report.feedback else report.all[:1]
    tuned, base = (
        " \N{RIGHTWARDS ARROW} ".join(f"{model.right.mean:.1%}" for model in models)
        for models in ([one.tuned for one in shown], [one.base for one in shown])
    )
    when = "at first, and after feedback" if len(shown) > 1 else "at first"
    return Cell(lines=[f"tuned {tuned} right", f"base {base}", f"val, {when}; {shown[0].rows:,} rows"])


def _of_other_weights(run: Run, digest: str) -> bool:
    """Return whether a digest is not that of the weights that are proven now."""
    return proven_weights(run.folder / "verified" / run.name, run.folder / "merged" / run.name) not in (None, digest)


def _address(page: Path, start: Path) -> str:
    return quote(Path(os.path.relpath(page.absolute(), start.absolute())).as_posix())


COLUMNS: dict[str, Callable[[Run], Cell]] = {
    "data": _data,
    "lengths": _lengths,
    "gate": _gate,
    "full run": _training,
    "verification": _verification,
    "evaluation": _evaluation,
    "answers": _answers,
}
"""The columns of the table, in the order of the stages."""
