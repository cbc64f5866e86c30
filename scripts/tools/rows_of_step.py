"""Show which rows the full training of a run took in a step: rank, id, tokens, source and first words.

    make rows RUN=my-run STEP=1200 CONFIG=my-run.yaml

Also of a training that is not finished, and of a step that failed.
"""

import argparse
import sys
from pathlib import Path

from vlmflow.config.model import check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.reports.trained_rows import newest_training, trained_rows

CONFIG = Path(__file__).resolve().parents[2] / "config.yaml"


def main(run: str, step: int, files: list[Path], folder: Path) -> None:
    """Print the rows of a step.

    files: as for snakemake's --configfile. folder: the working directory.

    Raises VlmflowError if the training has not reached the step, or its rows have changed.
    """
    settings = check_config(read_layers([CONFIG, *files]), [CONFIG, *files])
    run_folder = newest_training(folder / settings.stores.runs, run)
    found = trained_rows(run_folder, folder / "fitted" / run, step)
    print(f"{run_folder}, step {step}: {counted(len(found), 'row')}, {sum(row.tokens for row in found):,} tokens")
    width = max(len(row.id) for row in found)
    print(f"{'rank':>4} {'pass':>4} {'id':<{width}} {'tokens':>7}  source: first words")
    for row in found:
        print(f"{row.rank:>4} {row.forward_pass:>4} {row.id:<{width}} {row.tokens:>7,}  {row.source}: {row.text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="its name under runs")
    parser.add_argument("--step", required=True, type=int, help="an optimizer step, from 1")
    parser.add_argument(
        "--configfile", nargs="+", type=Path, default=[], help="as for snakemake; later files take precedence"
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="the working directory, as for snakemake")
    given = parser.parse_args()
    try:
        main(given.run, given.step, given.configfile, given.directory)
    except VlmflowError as error:
        sys.exit(str(error))
