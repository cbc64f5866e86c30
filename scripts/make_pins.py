"""Fill in what pins.yaml leaves empty: ask the hub for commit, size and digest of every row."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.pins import read_pins, write_pins
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.pinning import fill_in


def main(*, pins: Path = Path("pins.yaml")) -> None:
    """Write the table anew for review; rows that could be filled in are, also where others could not.

    pins: the table.
    """
    filled, hindrances = fill_in(read_pins(pins))
    write_pins(pins, filled)
    if hindrances:
        raise VlmflowError(
            "\n".join(error.cause for error in hindrances),
            "; ".join(dict.fromkeys(error.next_step for error in hindrances)),
        )


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
