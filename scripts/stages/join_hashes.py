"""Join the perceptual hashes that several pods made of one split."""

from pathlib import Path

from vlmflow.core.files import whole_file
from vlmflow.core.processes import joined_lines
from vlmflow.harness.stage import run_stage


def main(*, parts: list[Path], hashes: Path) -> None:
    """Join the tables.

    parts: the tables of all parts, in their order. hashes: JSON lines to write.
    """
    with whole_file(hashes) as file:
        file.writelines(joined_lines(parts))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
