"""What a finished run made, in a few lines for a person."""

from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.files import read_json
from vlmflow.rows.stats import SplitCounts, Stats


def summary(folder: Path, run: str) -> str:
    """Give the lines for `merged/RUN` in the working directory `folder`.

    Raises VlmflowError where the run is not finished.
    """
    merged = folder / "merged" / run
    facts = read_json(merged / "provenance.json")
    data, best = msgspec.convert(facts["data"], Stats, str_keys=True), facts["training"]["best"]
    data_folder = folder / "data" / data.dataset
    full = folder / "checkpoints" / run / "full"
    losses = read_json(full / "report.json")["eval_losses"]
    pages = (folder / "reports" / f"data-{data.dataset}.html", folder / "reports" / f"lengths-{run}.html")
    lines = [
        ("rows", "; ".join(_rows(name, counts) for name, counts in data.splits.items())),
        ("", f"why: {data_folder / 'counts.html'}; the rows: {data_folder / 'quarantine.jsonl'}"),
        ("lengths", _lengths(facts["smoke"])),
        ("smoke gate", f"open; expected: {facts['smoke']['full_run']['readable']}"),
        (
            "validation",
            f"loss {losses[0][1]:.2f} at step {losses[0][0]}, {best['eval_loss']:.2f} at step {best['step']}",
        ),
        ("", f"curve: {full / 'loss.png'}"),
        ("pages", "; ".join(str(page) for page in pages if page.is_file()) or "not made yet"),
        ("weights", f"{merged} (verified; model card: README.md, origin: provenance.json)"),
    ]
    return "\n".join(["", f"{run} is done.", *(f"  {name:<11} {text}" for name, text in lines), ""])


def _lengths(gate: dict[str, Any]) -> str:
    lengths = gate["lengths"]
    left_out, shortened = (sum(count[key] for count in gate["fitted"].values()) for key in ("left_out", "shortened"))
    return (
        f"{lengths['median']:,} tokens in the median row, {lengths['longest'][0]['tokens']:,} in the longest; "
        f"over-long rows: {left_out} left out, {shortened} shortened"
    )


def _rows(split: str, counts: SplitCounts) -> str:
    rows_in, kept, rejected, left_out = counts.went
    return f"{split}: {rows_in} in, {kept} kept, {rejected} rejected" + (f", {left_out} left out" if left_out else "")
