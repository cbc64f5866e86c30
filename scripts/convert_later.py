"""Say that a data set's rows cannot be converted yet."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.errors import VlmflowError


def main(*, raw: Path, converted: Path, rejects: Path, kind: str) -> None:
    """Refuse: the converter of this kind of data set is not written yet.

    raw: the file that would be read. converted, rejects: the files that would be written.
    """
    raise VlmflowError(f"{raw}: there is no converter for rows of kind {kind} yet", "use a data set of kind fire")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
