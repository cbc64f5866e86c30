"""Show which rows the full training of a run took in a step: rank, id, tokens, source and first words.

    make rows RUN=my-run STEP=1200 CONFIG=my-run.yaml

Also of a training that is not finished, and of a step that failed.
"""

from pathlib import Path

from vlmflow.config.model import errors_in_words, settings_of, tool_parser
from vlmflow.core.errors import counted
from vlmflow.reports.trained_rows import newest_training, trained_rows


def main(run: str, step: int, files: list[Path], folder: Path) -> None:
    """Print the rows of a step.

    files: as for snakemake's --configfile. folder: the working directory.

    Raises VlmflowError if the training has not reached the step, or its rows have changed.
    """
    settings = settings_of(files)
    run_folder = newest_training(folder / settings.stores.runs, run)
    found = trained_rows(run_folder, folder / "fitted" / run, step)
    print(f"{run_folder}, step {step}: {counted(len(found), 'row')}, {sum(row.tokens for row in found):,} tokens")
    width = max(len(row.id) for row in found)
    print(f"{'rank':>4} {'pass':>4} {'id':<{width}} {'tokens':>7}  source: first words")
    for row in found:
        print(f"{row.rank:>4} {row.forward_pass:>4} {row.id:<{width}} {row.tokens:>7,}  {row.source}: {row.text}")


if __name__ == "__main__":
    parser = tool_parser(__doc__, run="runs")
    parser.add_argument("--step", required=True, type=int, help="an optimizer step, from 1")
    given = parser.parse_args()
    with errors_in_words():
        main(given.run, given.step, given.configfile, given.directory)
