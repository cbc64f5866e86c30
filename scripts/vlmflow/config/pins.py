"""The table of sources on the hub: revision, size and digest by address, in `pins.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import BeforeValidator, Field

from vlmflow import CHECKOUT
from vlmflow.config.settings import Settings
from vlmflow.config.source import HubSource, files_of, parse_source
from vlmflow.config.table import read_table
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file

PINS = CHECKOUT / "pins.yaml"
"""The repository's own table."""


class Pin(Settings):
    """The revision, size and digest of one data file or model; None if unknown."""

    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """The full commit of its repository."""

    size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of the file; of a model, of all its files together."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the file; of a model, the result of `model_folder.digest_of` for its files."""


_TABLE = pydantic.TypeAdapter(dict[str, Annotated[Pin, BeforeValidator(lambda row: {} if row is None else row)]])


class _Dumper(yaml.SafeDumper):
    """Writes None as an empty value."""


_Dumper.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", ""))


def read_pins(path: Path) -> dict[str, Pin]:
    """Read the table: pins by address ("hf://datasets/OWNER/NAME/FILE", "hf://OWNER/NAME").

    A row for several files (`train-*-of-00004.parquet`) becomes one pin for each of them.

    Raises VlmflowError with one line per error: file, address, key, value, and what is allowed.
    """
    table = read_table(path, _TABLE)
    pins = {file: pin for address, pin in table.items() for file in files_of(address)}
    for address in pins:
        try:
            source = parse_source(address)
        except VlmflowError as error:
            raise VlmflowError(f"{path}: {error.cause}", error.next_step) from None
        if not isinstance(source, HubSource):
            raise VlmflowError(
                f"{path}: {address!r} is not a hub address", "remove the row: only hub addresses are pinned"
            )
        if source.revision:
            raise VlmflowError(f"{path}: {address!r} contains its revision", "move it to the key revision")
    return pins


def write_pins(path: Path, pins: Mapping[str, Pin]) -> None:
    """Write the table; keep the comments above its first row."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first_row = next((number for number, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))
    rows: dict[str, Any] = {address: pin.model_dump() for address, pin in pins.items()}
    with whole_file(path, "w") as file:
        file.write("".join(lines[:first_row]))
        yaml.dump(rows, file, Dumper=_Dumper, sort_keys=False, width=1000)


def pin_of(address: str, pins: Mapping[str, Pin]) -> Pin | None:
    """Return the revision that an address itself names, as a pin; else its row in the table, or None if it has none."""
    source = parse_source(address) if address.startswith("hf://") else None
    revision = source.revision if isinstance(source, HubSource) else None
    return Pin(revision=revision) if revision else pins.get(address)


def revision_of(address: str, path: Path = PINS) -> str | None:
    """Return the revision to which an address itself or the table pins it; None for other addresses and local paths.

    A stage depends only on the revision: it has the same content when its size or digest is filled in later.

    Raises VlmflowError as `read_pins` does.
    """
    pin = pin_of(address, read_pins(path))
    return pin.revision if pin else None
