"""Reads YAML that people edit, configuration files and tables; errors have the line and the column."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vlmflow.core.errors import VlmflowError

SHOWN = 500
"""Characters of a value that a message shows."""


def shown(value: Any, most: int = SHOWN) -> str:
    """Return a value for a message, cut after `most` characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def read_yaml(path: Path) -> Any:
    """Read a YAML or JSON file; None if it is empty.

    Raises VlmflowError with the file; if it is not YAML, or has a key twice, also with line, column, cause, and the
    line itself.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _loaded(_without_tabs(text))
    except yaml.MarkedYAMLError as error:
        raise VlmflowError(_fault(path, text, error), "fix it there, or in the lines before") from None
    except yaml.YAMLError as error:
        raise VlmflowError(f"{path}: {' '.join(str(error).split())}", "fix it there") from None
    except RecursionError:
        raise VlmflowError(f"{path}: the blocks are nested too deeply", "fix it there") from None
    except OSError as error:
        raise VlmflowError(f"{path}: {error.strerror}", "name a file that exists and can be read") from None
    except UnicodeDecodeError as error:
        raise VlmflowError(f"{path}: {error}", "save the file as UTF-8") from None
    except ValueError as error:  # a name that no file can have
        raise VlmflowError(f"{path}: {error}", "name a file that exists and can be read") from None


def read_layers(files: Iterable[Path]) -> dict[str, Any]:
    """Read configuration files and merge each into those before it, key by key, as Snakemake does.

    Raises VlmflowError as read_yaml does, and for a file that is empty or has no keys.
    """
    merged: dict[str, Any] = {}
    for file in files:
        _lay_over(merged, read_config(file))
    return merged


def read_config(path: Path) -> dict[str, Any]:
    """Read one configuration file; raises VlmflowError as read_layers does."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        fault = "is empty" if content is None else f"holds {content!s:.80}, not keys"
        raise VlmflowError(f"{path}: {fault}", "add keys from docs/config.md to it, or leave the file out")
    return content


def _lay_over(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(lower.get(key), dict):
            _lay_over(lower[key], value)
        else:
            lower[key] = value


MOST_VALUES = 100_000
"""The most values that a file may have with its aliases expanded: ten lines of aliases can expand to billions."""


SHORT = 32_000
"""The most characters of a text that libyaml reads: in a longer one, blocks could be nested beyond its stack."""


def _loaded(text: str) -> Any:
    """Return the content of YAML.

    libyaml takes a tenth of the time; PyYAML's own parser reads what it refuses, to say why, and texts with tabs, of
    which libyaml allows some.
    """
    if len(text) <= SHORT and "\t" not in text:
        with suppress(yaml.YAMLError):
            return yaml.load(text, _QuickLoader)  # noqa: S506 (a SafeLoader)
    return yaml.load(text, _Loader)  # noqa: S506


class _Constructor(yaml.constructor.SafeConstructor):
    """Refuses a duplicate key in a block, and aliases that expand to more than MOST_VALUES or to themselves.

    PyYAML's own loader silently uses the last of two equal keys. It also raises ValueError, without the line, for a
    number of more than 4,300 digits and for a date that no calendar has.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        _count(node, {})
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
            if isinstance(made, int):
                str(made)  # fails for a long hexadecimal number, which no message could show
        except ValueError as error:
            fault = f"{shown(node.value, 40)} cannot be read: {str(error).split(';')[0]}"
            raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark) from None
        return made

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in first:
                    fault = f"the key {key.value!r} is already in line {first[key.value]}; a block has each key once"
                    raise yaml.MarkedYAMLError(problem=fault, problem_mark=key.start_mark)
                first[key.value] = key.start_mark.line + 1
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


class _Loader(_Constructor, yaml.SafeLoader):
    pass


class _QuickLoader(_Constructor, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


def _count(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node, with aliases expanded.

    counts: the numbers of the nodes seen so far; 0 for a node that contains this one.

    Raises yaml.MarkedYAMLError if there are more than MOST_VALUES, or an alias is inside the value that it names.
    """
    if counts.get(node) == 0:
        raise yaml.MarkedYAMLError(problem="an alias is inside the value that it names", problem_mark=node.start_mark)
    if node not in counts:
        counts[node] = 0
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [child for each in children for child in (each if isinstance(each, tuple) else [each])]
        counts[node] = 1 + sum(_count(child, counts) for child in inner)
        if counts[node] > MOST_VALUES:
            fault = f"more than {MOST_VALUES:,} values, with aliases expanded"
            raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark)
    return counts[node]


def _without_tabs(text: str) -> str:
    """Return JSON with blanks for its tabs, which YAML does not allow between tokens; return other text unchanged."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _fault(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    mark, begin = error.problem_mark, error.context_mark
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    context = f" {error.context}" if error.context else ""
    begun = f" begun in line {begin.line + 1}, column {begin.column + 1}" if begin else ""
    line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
    return f"{path}{where}: {error.problem}{context}{begun}{f'; the line is: {line:.100}' if line else ''}"
