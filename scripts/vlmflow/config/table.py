"""YAML that people edit, read: the repository's tables (pins.yaml, picture_sources.yaml) checked too."""

from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from vlmflow.config.faults import say_faults
from vlmflow.errors import VlmflowError

Table = TypeVar("Table")


def read_table(path: Path, kind: pydantic.TypeAdapter[Table]) -> Table:
    """Read a YAML file as what `kind` says; an empty file is an empty table.

    Raises VlmflowError with a line per fault: file, row, key, value, and what is allowed.
    """
    table = read_yaml(path)
    try:
        return kind.validate_python(table)
    except pydantic.ValidationError as error:
        raise VlmflowError(say_faults(error, kind.json_schema(), table, [path]), "mend the table") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file; {} where it is empty.

    Raises VlmflowError with the file, and where it is no YAML with line, column and what is wrong there.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:
        raise VlmflowError(_fault(path, error), "mend it there, or in the lines before") from None
    except yaml.YAMLError as error:
        raise VlmflowError(f"{path}: {' '.join(str(error).split())}", "mend it there") from None
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise VlmflowError(f"{path}: {words}", "give a file of UTF-8 text that can be read") from None


def _fault(path: Path, error: yaml.MarkedYAMLError) -> str:
    mark, begin = error.problem_mark, error.context_mark
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    context = f" {error.context}" if error.context else ""
    begun = f" begun in line {begin.line + 1}, column {begin.column + 1}" if begin else ""
    return f"{path}{where}: {error.problem}{context}{begun}"
