"""A summary of a finished run, in a few lines for people."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.evaluation.verdict import REPORT
from vlmflow.fetch.placed import PROVENANCE
from vlmflow.reports.provenance import Provenance, published_weights
from vlmflow.rows.stats import SplitCounts
from vlmflow.supervisor.report import Gate

SPLITS = ("val", "test")
Line = tuple[str, str]
"""A line's first word, "" if it is that of the line above, and what it says."""


def files_of(run: str, dataset: str) -> list[tuple[str, str]]:
    """Return what `summary` looks for in the working directory: targets, each with a file in it, or "" for itself."""
    evaluations = [(f"eval/{run}/{split}", REPORT) for split in SPLITS]
    return [(f"merged/{run}", PROVENANCE), *evaluations, *((page, "") for page in _pages(run, dataset))]


def summary(folder: Path, run: str, dataset: str, shown: str) -> str:
    """Return the lines on `merged/RUN`; what cannot be read is named in its line.

    folder: the working directory. dataset: the run's. shown: what people write before the name of a target.
    """
    pages = [f"{shown}{page}" for page in _pages(run, dataset) if (folder / page).is_file()]
    lines = [
        *_origin(folder, run, shown),
        *_verdicts(folder, run),
        *_below("pages", pages or ["not made yet"]),
        ("weights", f"{shown}merged/{run} (verified; model card: README.md, origin: {PROVENANCE})"),
    ]
    return "\n".join(["", f"{run} is done.", *(f"  {name:<11} {text}" for name, text in lines), ""])


def _origin(folder: Path, run: str, shown: str) -> Iterator[Line]:
    try:
        facts = read_account(folder / "merged" / run / PROVENANCE, Provenance)
    except VlmflowError as error:
        yield "origin", f"cannot be read: {error.cause}"
        return
    data, best = facts.data, facts.training.best
    first_step, first_loss = facts.training.eval_losses[0]
    of_data = f"{shown}data/{data.dataset}"
    yield "rows", "; ".join(_rows(name, counts) for name, counts in data.splits.items())
    yield "", f"why: {of_data}/counts.html; the rows: {of_data}/quarantine.jsonl"
    yield "lengths", _lengths(facts.smoke)
    yield "smoke gate", f"passed; the full run takes {facts.smoke.full_run.readable}"
    yield "validation", f"loss {first_loss:.2f} at step {first_step}, {best.eval_loss:.2f} at step {best.step}"
    yield "", f"curve: {shown}checkpoints/{run}/full/loss.png"


def _verdicts(folder: Path, run: str) -> Iterator[Line]:
    evaluated = [split for split in SPLITS if (folder / "eval" / run / split / REPORT).is_file()]
    if not evaluated:
        return iter([("verdict", f"none yet: eval/{run}/val compares it with its base")])
    return _below("verdict", [f"{split}: {_verdict(folder, run, split)}" for split in evaluated])


def _verdict(folder: Path, run: str, split: str) -> str:
    try:
        report = read_account(folder / "eval" / run / split / REPORT, EvaluationReport)
        of_these = report.tuned.digest == published_weights(folder / "merged" / run)
    except VlmflowError as error:
        return f"cannot be read: {error.cause}"
    return report.sentence if of_these else f"of other weights: remove eval/{run}/{split} and make it again"


def _pages(run: str, dataset: str) -> list[str]:
    names = [f"data-{dataset}", *(f"{page}-{run}" for page in ("lengths", "estimate", "run", "eval"))]
    return [f"reports/{name}.html" for name in names]


def _below(name: str, texts: Iterable[str]) -> Iterator[Line]:
    return ((name if number == 0 else "", text) for number, text in enumerate(texts))


def _lengths(gate: Gate) -> str:
    return (
        f"{gate.lengths.median:,} tokens in the median row, {gate.lengths.longest[0].tokens:,} in the longest; "
        f"over-long rows: {gate.left_out} left out, {gate.shortened} shortened"
    )


def _rows(split: str, counts: SplitCounts) -> str:
    rows_in, kept, rejected, left_out = counts.went
    return f"{split}: {rows_in} in, {kept} kept, {rejected} rejected" + (f", {left_out} left out" if left_out else "")
