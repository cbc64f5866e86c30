"""Values of the configuration, as messages show them."""

import json
from typing import Any

SHOWN = 500
"""Characters of a value that a message shows."""


def shown(value: Any, most: int = SHOWN) -> str:
    """Return a value for a message, cut after `most` characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
