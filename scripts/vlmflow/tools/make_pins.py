"""Fill in the empty values of pins.yaml: ask the hub for commit, size and digest of every row."""

from pathlib import Path

from vlmflow.config.pins import read_pins, write_pins
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.pinning import fill_in
from vlmflow.harness.stage import run_stage


def main(*, pins: Path = Path("pins.yaml")) -> None:
    """Rewrite the table for review; a failed row does not prevent the others.

    pins: the table.

    Raises VlmflowError with all failures, after the table is written.
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
