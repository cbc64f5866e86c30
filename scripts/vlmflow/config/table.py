"""Reads and checks the repository's tables that people edit (pins.yaml, picture_sources.yaml)."""

from pathlib import Path
from typing import TypeVar

import pydantic

from vlmflow.config.faults import say_faults
from vlmflow.config.yaml_file import read_yaml
from vlmflow.core.errors import VlmflowError

Table = TypeVar("Table")


def read_table(path: Path, kind: pydantic.TypeAdapter[Table]) -> Table:
    """Read a YAML file as a table of type `kind`; an empty file is an empty table.

    Raises VlmflowError with one line per error: file, row, key, value, and what is allowed.
    """
    table = read_yaml(path) or {}
    try:
        return kind.validate_python(table)
    except pydantic.ValidationError as error:
        raise VlmflowError(
            say_faults(error, kind.json_schema(), table, [path]), f"correct these keys in {path}"
        ) from None
