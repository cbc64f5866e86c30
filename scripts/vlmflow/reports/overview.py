"""What runs have made, for people: a page of all runs of a folder, and lines on a finished run for the screen.

Both read files that other processes may be writing, and that a job may have damaged: a file that cannot be read is one
line, and ends nothing.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from vlmflow.config.model import settings_of
from vlmflow.config.settings import is_name
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted, printable
from vlmflow.core.files import write_text
from vlmflow.evaluation.report import AnswerReport, EvaluationReport
from vlmflow.evaluation.verdict import REPORT
from vlmflow.fetch.placed import PROVENANCE, model_with
from vlmflow.lengths.summary import FittedRows, LengthSummary
from vlmflow.merging.proof import PROOF, Proof
from vlmflow.reports.eval_figures import colour_of
from vlmflow.reports.former_trainings import MadeOf, former_trainings, to_train, trained
from vlmflow.reports.page import ENVIRONMENT, render
from vlmflow.reports.provenance import Provenance, proven_weights, published_weights
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport

T = TypeVar("T")

COLUMNS = ("data", "lengths", "gate", "full run", "verification", "evaluation", "answers")
"""The columns of the table, in the order of the stages; each is a macro of `index_cells.html.jinja`."""

PER_RUN = ("lengths", "fitted", "checkpoints", "verified", "merged", "eval", "answers")
"""The folders of targets in which a run has a folder of its name."""

SPLITS = ("val", "test")
"""The splits on which a run may be evaluated."""

NEVER_WRITTEN = (ArithmeticError, LookupError, ValueError)
"""What a figure that no stage writes may raise when it is shown."""


def write_index(files: list[Path], folder: Path) -> Path:
    """Write the page of all runs of a working directory, reports/index.html, and return its place.

    files: configurations over config.yaml; the runs that they name are listed also before they have begun.

    Raises VlmflowError if the configuration is refused, or the folder does not exist.
    """
    if not folder.is_dir():
        raise VlmflowError(f"{folder} is not a folder", "name the working directory by --directory")
    settings = settings_of(files)
    named = read_layers(files).get("runs", {})
    configured = {
        name: to_train(settings.models[run.model].source, run.dataset, run)
        for name, run in settings.runs.items()
        if name in named
    }
    page = folder / "reports" / "index.html"
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    html, runs = index_page(folder, folder / settings.stores.runs, page, configured, now)
    write_text(page, html)
    none = "; name the working directory by --directory" if not runs else ""
    print(f"{page}: {counted(runs, 'run')}{none}")
    return page


def index_page(folder: Path, store: Path, page: Path, configured: Mapping[str, MadeOf], now: str) -> tuple[str, int]:
    """Return `reports/index.html`, what every run has made so far with links to its pages, and how many runs it has.

    folder: the working directory. store: the folder of all run folders (stores.runs). page: the file that it becomes;
    links are relative to it. configured: what each run of the configuration is made of; runs found in `folder` are
    added. now: date and time for people.
    """
    parents = [path for path in (*(folder / name for name in PER_RUN), store) if path.is_dir()]
    there = (path.name for parent in parents for path in parent.iterdir() if is_name(path.name) and path.is_dir())
    names = sorted({*configured, *there})
    rows = [_row(Run(name, folder, store / name, page.parent, configured.get(name))) for name in names]
    here = printable(folder.resolve().name)
    return render("index.html.jinja", here=here, now=now, columns=COLUMNS, rows=rows), len(rows)


@dataclass(frozen=True)
class Run:
    """A run's files; what they give is None without them.

    folder: the working directory. store: the run's own folder of all its trainings. pages: the folder of the index, for
    links. configured: what the configuration trains it from, if that has it.
    """

    name: str
    folder: Path
    store: Path
    pages: Path
    configured: MadeOf | None

    def _read(self, account: str, form: type[T]) -> T | None:
        file = self.folder / account
        return read_account(file, form) if file.is_file() else None

    @property
    def fitted(self) -> FittedRows | None:
        """The rows that fit."""
        return self._read(f"fitted/{self.name}/account.json", FittedRows)

    @property
    def dataset(self) -> str | None:
        """The name of its data set; raises ValueError if it is none."""
        made_of = self.configured or self.fitted
        if made_of and not is_name(made_of.dataset):
            account = self.folder / "fitted" / self.name / "account.json"
            raise ValueError(f"{account}: {made_of.dataset!r} is not the name of a data set")
        return made_of.dataset if made_of else None

    @property
    def stats(self) -> Stats | None:
        """The account of its data set."""
        return self._read(f"data/{self.dataset}/stats.json", Stats)

    @property
    def lengths(self) -> LengthSummary | None:
        """The lengths of its rows."""
        return self._read(f"lengths/{self.name}/summary.json", LengthSummary)

    @property
    def gate(self) -> Gate | None:
        """The gate; a closed one is in its run folder alone."""
        gate = self._read(f"checkpoints/{self.name}/smoke/gate.json", Gate)
        closed = None if gate else self.newest("smoke/*/gate.json")
        return read_account(closed, Gate) if closed else gate

    @cached_property
    def report(self) -> TrainingReport | None:
        """The report of the finished training."""
        return self._read(f"checkpoints/{self.name}/full/report.json", TrainingReport)

    @property
    def made_of(self) -> MadeOf | None:
        """What the finished training was made of, else what the configuration says."""
        if not self.report:
            return self.configured
        model = model_with(self.folder / "models", self.report.digests.model)
        return trained(model[1].source if model else "", "", self.report)

    @property
    def proof(self) -> Proof | None:
        """The proof of its weights."""
        return self._read(f"verified/{self.name}/{PROOF}", Proof)

    @property
    def evaluations(self) -> list[EvaluationReport]:
        """The evaluations on val and on test; [] without one."""
        reports = (self._read(f"eval/{self.name}/{split}/{REPORT}", EvaluationReport) for split in SPLITS)
        return [report for report in reports if report]

    @property
    def answers(self) -> AnswerReport | None:
        """How often the tuned model and its base answer rightly on val."""
        return self._read(f"answers/{self.name}/val/{REPORT}", AnswerReport)

    def of_other_weights(self, reports: Iterable[EvaluationReport | AnswerReport]) -> bool:
        """Return whether one of the reports is not of the weights that are proven now."""
        proven = proven_weights(self.folder / "verified" / self.name, self.folder / "merged" / self.name)
        return any(proven not in (None, report.tuned.digest) for report in reports)

    def newest(self, file: str) -> Path | None:
        """Return the newest file of this name in the run folders of a stage ("full/*/run.html")."""
        return max(self.store.glob(file), key=lambda path: path.stat().st_mtime, default=None)

    def address(self, page: Path | str | None) -> str | None:
        """Return the address of a page that exists, relative to the index. page: a text is below the working folder."""
        file = self.folder / page if isinstance(page, str) else page
        if file is None or not file.is_file():
            return None
        return quote(Path(os.path.relpath(file.absolute(), self.pages.absolute())).as_posix())


def _row(run: Run) -> dict[str, Any]:
    """Return the facts of one row: its cells, what the run is made of, and why a column could not be read."""
    macros = ENVIRONMENT.get_template("index_cells.html.jinja").make_module({"colour_of": colour_of})
    faults: dict[str, str] = {}

    def tried(column: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (VlmflowError, OSError, *NEVER_WRITTEN) as error:
            cause = error.cause if isinstance(error, VlmflowError) else f"{type(error).__name__}: {error}"
            faults.setdefault(printable(" ".join(cause.split())), column)  # two columns may read the same file
            return None

    return {
        "run": run,
        "cells": [tried(column, partial(getattr(macros, column.replace(" ", "_")), run)) for column in COLUMNS],
        "made_of": tried("full run", lambda: run.made_of),
        "former": tried("full run", lambda: former_trainings(run.store / "full", run.report)),
        "faults": faults,
    }


Line = tuple[str, str]
"""A line's first word, "" if it is that of the line above, and what it says."""


def summary_files(run: str, dataset: str) -> list[tuple[str, str]]:
    """Return what `summary` looks for in the working directory: targets, each with a file in it, or "" for itself."""
    evaluations = [(f"eval/{run}/{split}", REPORT) for split in SPLITS]
    return [(f"merged/{run}", PROVENANCE), *evaluations, *((page, "") for page in _pages(run, dataset))]


def summary(folder: Path, run: str, dataset: str, shown: str) -> str:
    """Return the lines on `merged/RUN`; what cannot be read is named in its line.

    folder: the working directory. dataset: the run's. shown: what people write before the name of a target.
    """
    pages = [f"{shown}{page}" for page in _pages(run, dataset) if (folder / page).is_file()]
    verdicts = [_verdict(folder, run, split) for split in SPLITS if (folder / "eval" / run / split / REPORT).is_file()]
    lines = [
        *_origin(folder, run, shown),
        *_below("verdict", verdicts or [f"none yet: eval/{run}/val compares it with its base"]),
        *_below("pages", pages or ["not made yet"]),
        ("weights", f"{shown}merged/{run} (verified; model card: README.md, origin: {PROVENANCE})"),
    ]
    return "\n".join(["", f"{run} is done.", *(f"  {name:<11} {text}" for name, text in lines), ""])


def _pages(run: str, dataset: str) -> list[str]:
    names = [f"data-{dataset}", *(f"{page}-{run}" for page in ("lengths", "estimate", "run", "eval"))]
    return [f"reports/{name}.html" for name in names]


def _below(name: str, texts: Iterable[str]) -> Iterator[Line]:
    return ((name if number == 0 else "", text) for number, text in enumerate(texts))


def _origin(folder: Path, run: str, shown: str) -> Iterator[Line]:
    try:
        facts = read_account(folder / "merged" / run / PROVENANCE, Provenance)
    except VlmflowError as error:
        yield "origin", f"cannot be read: {error.cause}"
        return
    gate, best = facts.smoke, facts.training.best
    first_step, first_loss = facts.training.eval_losses[0]
    of_data = f"{shown}data/{facts.data.dataset}"
    went = []
    for split, counts in facts.data.splits.items():
        rows_in, kept, rejected, left_out = counts.went
        others = f", {left_out} left out" if left_out else ""
        went.append(f"{split}: {rows_in} in, {kept} kept, {rejected} rejected{others}")
    yield "rows", "; ".join(went)
    yield "", f"why: {of_data}/counts.html; the rows: {of_data}/quarantine.jsonl"
    yield (
        "lengths",
        f"{gate.lengths.median:,} tokens in the median row, {gate.lengths.longest[0].tokens:,} in the longest; "
        f"over-long rows: {gate.left_out} left out, {gate.shortened} shortened",
    )
    yield "smoke gate", f"passed; the full run takes {gate.full_run.readable}"
    yield "validation", f"loss {first_loss:.2f} at step {first_step}, {best.eval_loss:.2f} at step {best.step}"
    yield "", f"curve: {shown}checkpoints/{run}/full/loss.png"


def _verdict(folder: Path, run: str, split: str) -> str:
    try:
        report = read_account(folder / "eval" / run / split / REPORT, EvaluationReport)
        of_these = report.tuned.digest == published_weights(folder / "merged" / run)
    except VlmflowError as error:
        return f"{split}: cannot be read: {error.cause}"
    sentence = report.sentence if of_these else f"of other weights: remove eval/{run}/{split} and make it again"
    return f"{split}: {sentence}"
