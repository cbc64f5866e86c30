"""Values of the configuration and what is allowed for them, as messages show both."""

import json
from typing import Any

Schema = dict[str, Any]

SHOWN = 500
"""Characters of a value that a message shows."""


def shown(value: Any, most: int = SHOWN) -> str:
    """Return a value for a message, cut after `most` characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "a block of keys",
    "null": "null",
}

BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "pattern": "of the form",
}


def allowed(schema: Schema) -> str:
    """Return what a JSON Schema allows, as messages and the reference page put it."""
    if "$ref" in schema:
        return "a block, see below"
    if "anyOf" in schema:
        return " or ".join(allowed(branch) for branch in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join("true" if one is True else str(one) for one in schema["enum"])
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([TYPES.get(schema.get("type", ""), "something else"), *bounds])
