"""Turn raw FIRE rows into ShareGPT rows, in the trajectory or the timestep form."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.rows.convert import convert_fire, training_form


def main(
    *,
    raw: Path,
    converted: Path,
    rejects: Path,
    split: str,
    form: str,
    max_history_rounds: int | None,
    threads: int = 1,
) -> None:
    """Convert one split.

    raw: the split's JSON array, as FIRE publishes it.
    converted: JSON lines to write, one training row each.
    rejects: JSON lines to write, one for each raw row that cannot be used.
    split: train or test.
    form: trajectory or timestep.
    max_history_rounds: timestep form: earlier attempts in an example's state; null for all.
    """
    convert_fire(raw, converted, rejects, split, training_form(form, max_history_rounds), threads)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
