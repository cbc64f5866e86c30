"""What a finished run made, in a few lines for a person."""

from pathlib import Path
from typing import Any

from vlmflow.files import read_json


def summary(folder: Path, run: str) -> str:
    """Give the lines for `merged/RUN` in the working directory `folder`.

    Raises VlmflowError where the run is not finished.
    """
    merged = folder / "merged" / run
    facts = read_json(merged / "provenance.json")
    data, best = facts["data"], facts["training"]["best"]
    data_folder = folder / "data" / data["dataset"]
    full = folder / "checkpoints" / run / "full"
    losses = read_json(full / "report.json")["eval_losses"]
    lines = [
        ("rows", "; ".join(_rows(name, data[name]) for name in ("train", "test") if name in data)),
        ("", f"why: {data_folder / 'counts.html'}; the rows: {data_folder / 'quarantine.jsonl'}"),
        ("smoke gate", f"open: {facts['smoke']['full_run']['readable']} were expected"),
        (
            "validation",
            f"loss {losses[0][1]:.2f} at step {losses[0][0]}, {best['eval_loss']:.2f} at step {best['step']}",
        ),
        ("", f"curve: {full / 'loss.png'}"),
        ("weights", f"{merged} (verified; model card: README.md, origin: provenance.json)"),
    ]
    return "\n".join(["", f"{run} is done.", *(f"  {name:<11} {text}" for name, text in lines), ""])


def _rows(split: str, counts: dict[str, Any]) -> str:
    return f"{split}: {counts['rows_in']} in, {counts['kept']} kept, {sum(counts['rejected'].values())} rejected"
