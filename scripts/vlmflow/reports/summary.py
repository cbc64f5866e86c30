"""A summary of a finished run, in a few lines for people."""

from pathlib import Path

from vlmflow.core.account import read_account
from vlmflow.reports.accounts import Provenance
from vlmflow.rows.stats import SplitCounts
from vlmflow.training.accounts import Gate, TrainingReport


def summary(folder: Path, run: str) -> str:
    """Return the lines for `merged/RUN` in the working directory `folder`.

    Raises VlmflowError if the run is not finished.
    """
    merged = folder / "merged" / run
    facts = read_account(merged / "provenance.json", Provenance)
    data, best = facts.data, facts.training.best
    data_folder = folder / "data" / data.dataset
    full = folder / "checkpoints" / run / "full"
    first_step, first_loss = read_account(full / "report.json", TrainingReport).eval_losses[0]
    pages = [folder / "reports" / f"{name}.html" for name in (f"data-{data.dataset}", f"lengths-{run}", f"run-{run}")]
    lines = [
        ("rows", "; ".join(_rows(name, counts) for name, counts in data.splits.items())),
        ("", f"why: {data_folder / 'counts.html'}; the rows: {data_folder / 'quarantine.jsonl'}"),
        ("lengths", _lengths(facts.smoke)),
        ("smoke gate", f"passed; the full run takes {facts.smoke.full_run.readable}"),
        (
            "validation",
            f"loss {first_loss:.2f} at step {first_step}, {best.eval_loss:.2f} at step {best.step}",
        ),
        ("", f"curve: {full / 'loss.png'}"),
        ("pages", "; ".join(str(page) for page in pages if page.is_file()) or "not made yet"),
        ("weights", f"{merged} (verified; model card: README.md, origin: provenance.json)"),
    ]
    return "\n".join(["", f"{run} is done.", *(f"  {name:<11} {text}" for name, text in lines), ""])


def _lengths(gate: Gate) -> str:
    return (
        f"{gate.lengths.median:,} tokens in the median row, {gate.lengths.longest[0].tokens:,} in the longest; "
        f"over-long rows: {gate.left_out} left out, {gate.shortened} shortened"
    )


def _rows(split: str, counts: SplitCounts) -> str:
    rows_in, kept, rejected, left_out = counts.went
    return f"{split}: {rows_in} in, {kept} kept, {rejected} rejected" + (f", {left_out} left out" if left_out else "")
