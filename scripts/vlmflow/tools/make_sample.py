"""Make the demo's data: a small FIRE with drawn pictures and deliberate faults."""

from pathlib import Path

from vlmflow.demo.sample import write_sample
from vlmflow.harness.stage import run_stage


def main(*, folder: Path, train_rows: int = 3_200, test_rows: int = 48, seed: int = 42) -> None:
    """Write the sample; the same arguments give the same bytes.

    folder: the folder to write; an existing one is replaced. It gets the two JSON files of FIRE, the folder `pictures`,
    and `faults.json`, which lists the faults and the expected result of each.
    train_rows, test_rows: the number of rows of the splits, with faulty ones. A tenth of the train rows is the demo's
    val: 240 pictures, so that it has two halves, each with the 100 that a verdict needs.
    seed: determines pictures, questions, words and faults.
    """
    write_sample(folder, train_rows, test_rows, seed)


if __name__ == "__main__":
    run_stage(main)
