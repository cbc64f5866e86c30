"""Fetch one raw data file: from the hub through the store, or from a path on this machine."""

from pathlib import Path

from vlmflow.config.source import parse_source
from vlmflow.config.tables import PINS, pin_of, read_pins
from vlmflow.fetch.placed import copy, link_or_copy, write_raw_account
from vlmflow.harness.stage import run_stage


def main(*, raw: Path, account: Path, source: str, store: Path, pins: Path = PINS) -> None:
    """Fetch one raw file.

    raw: the file to write. account: a JSON file to write, with its size and sha256.
    source: hf://datasets/OWNER/NAME/FILE or …/NAME@COMMIT/FILE, file:///PATH, or a path.
    store: the folder for files from the hub, by repository and revision.
    pins: the table with revision, size and sha256 of hub sources.
    """
    origin = parse_source(source)
    if isinstance(origin, Path):
        copy(origin, raw)
    else:
        from vlmflow.fetch.from_hub import fetch_data_file  # the import of the hub's client takes longer than a copy

        link_or_copy(fetch_data_file(origin, pin_of(source, read_pins(pins)), store), raw)
    write_raw_account(raw, account)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
