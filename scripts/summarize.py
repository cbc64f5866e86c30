"""Print what a finished run made, and where it is."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.reports.summary import summary


def main(*, folder: Path, run: str) -> None:
    """Print the summary.

    folder: the working directory of the run. run: its name.
    """
    print(summary(folder, run))


if __name__ == "__main__":
    run_stage(main)
