"""Reads files that a model's owner wrote, which may hold anything."""

from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json

PUBLISHED = "use the files that the model's owner published"

MOST_TEXT_BYTES = 1_000_000
"""Of a chat template: some 20 times the largest known one. A larger file would fill the memory."""


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file with one object; raises VlmflowError as `read_json`, and for other values."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise VlmflowError(f"{file}: {value!r:.100} is not a JSON object", PUBLISHED)
    return value


def read_template(file: Path) -> str:
    """Return the text of a file in UTF-8; raises VlmflowError if it is none, or too large."""
    size = file.stat().st_size
    if size > MOST_TEXT_BYTES:
        raise VlmflowError(f"{file}: has {size:,} bytes; a chat template has at most {MOST_TEXT_BYTES:,}", PUBLISHED)
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise VlmflowError(f"{file}: is not in UTF-8: {error}", PUBLISHED) from None


def utf8(text: str, file: Path) -> bytes:
    """Return a text in UTF-8. file: where it was read; raises VlmflowError if it holds what no UTF-8 has."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise VlmflowError(f"{file}: holds a text that cannot be in UTF-8: {error}", PUBLISHED) from None
