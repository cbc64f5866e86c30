"""Reports the errors in a configuration, one line each: file, key path, value, and what is allowed."""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pydantic

from vlmflow.config.settings import Schema, allowed
from vlmflow.config.yaml_file import read_yaml, shown

COMMAND_LINE = "--config"
"""The source of a value, for messages, if none of the files has it."""

SECRET = ("_token", "_secret", "_webhook_url")
"""Ends of the names of keys whose values messages do not show."""

PLANNED = "train.micro_batch_tokens plans each step's passes"
FORMER_KEYS = {
    ("runs", "train", "packing"): PLANNED,
    ("runs", "train", "padding_free"): PLANNED,
    ("runs", "cached_dataset"): f"{PLANNED}, from lengths that are already counted",
}
"""Keys that no longer exist, without the name in them (`runs.NAME.train.packing`), with what there is instead."""


def say_faults(error: pydantic.ValidationError, schema: Schema, merged: Any, files: list[Path]) -> str:
    """Return the lines for all errors that pydantic found.

    schema: the JSON Schema of the model, which says what is allowed for each key.
    merged: the configuration that was checked.
    files: the files from which it was merged, lowest first; a message names the last one that has the key.
    """
    contents = [(file, read_yaml(file) or {}) for file in files]
    return "\n".join(dict.fromkeys(_say(fault, schema, merged, contents) for fault in error.errors()))


def _say(fault: Any, schema: Schema, merged: Any, contents: list[tuple[Path, Any]]) -> str:
    path = _key_path(fault, merged)
    keys = ".".join(key if key.isprintable() else repr(key)[1:-1] for key in map(str, path))
    where = f"{_origin(path, contents)}: {keys or 'the configuration'}"
    if fault["type"] == "value_error":
        cause = str(fault["ctx"]["error"])
        if "[key]" in fault["loc"]:
            return f"{where}: {_shown(path, merged)} is not allowed; {cause}"
        file = _origin([*path, *_keys_named(cause, _value_at(merged, path))], contents)
        return f"{file}: {'.'.join(map(str, path))}{': ' if path else ''}{cause}"
    if "[key]" in fault["loc"]:
        return f"{where}: the name is not allowed; it must be a letter or digit, then up to 99 of [A-Za-z0-9._-]"
    if fault["type"] == "extra_forbidden" and (instead := FORMER_KEYS.get((*path[:1], *path[2:]))):
        return f"{where}: no longer exists; remove it: {instead} (docs/training.md)"
    if fault["type"] == "extra_forbidden":
        known = list(_schema_at(schema, path[:-1], fault["loc"]).get("properties", {}))
        nearest = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        hint = f"; nearest known key: {nearest[0]}" if nearest else ""
        return f"{where}: unknown key; allowed: {', '.join(known)}{hint}"
    wanted = allowed(_schema_at(schema, path, fault["loc"]))
    if fault["type"] == "missing":
        return f"{_origin(path[:-1], contents)}: {'.'.join(map(str, path))}: missing; it must be {wanted}"
    return f"{where}: {_shown(path, merged)} is not allowed; it must be {wanted}"


def _shown(path: list[Any], merged: Any) -> str:
    if any(str(key).endswith(SECRET) for key in path):
        return "its value"
    return shown(_value_at(merged, path))


def _key_path(fault: Any, merged: Any) -> list[Any]:
    """Return the user's keys on the way to a fault, without pydantic's own marks (union branches)."""
    path, here = [], merged
    for key in fault["loc"]:
        if _has(here, key):
            here = here[key]
            path.append(key)
        elif fault["type"] == "missing" and key == fault["loc"][-1]:
            path.append(key)
    return path


def _keys_named(cause: str, here: Any) -> list[str]:
    """Return the keys with which a cause begins ("runs.my.run.model: …"), as far as they lead from `here`."""
    keys, rest = [], cause.split(": ", 1)[0] + "."
    while isinstance(here, dict):
        key = max((key for key in map(str, here) if rest.startswith(f"{key}.")), key=len, default=None)
        if key is None or key not in here:
            break
        keys.append(key)
        here, rest = here[key], rest[len(key) + 1 :]
    return keys


def _has(content: Any, key: Any) -> bool:
    if isinstance(content, list):
        return isinstance(key, int) and key < len(content)
    return isinstance(content, dict) and key in content


def _value_at(content: Any, path: list[Any]) -> Any:
    for key in path:
        content = content[key]
    return content


def _origin(path: list[Any], contents: list[tuple[Path, Any]]) -> str:
    """Return the last file that has the whole key path, or COMMAND_LINE if none has it."""
    for file, content in reversed(contents):
        here = content
        for key in path:
            if not _has(here, key):
                break
            here = here[key]
        else:
            return str(file)
    return COMMAND_LINE


def _schema_at(schema: Schema, path: list[Any], tags: Collection[Any]) -> Schema:
    """Return the part of the model's JSON Schema to which a key path leads; {} if it leads nowhere.

    tags: with the names of the definitions that were chosen where a block may be one of several.
    """
    here, nothing = schema, Schema()
    for key in path:
        named = here.get("patternProperties", {}).values()
        inner = here.get("properties", {}).get(key) or next(iter(named), None)
        listed = [branch["items"] for branch in [here, *here.get("anyOf", [])] if "items" in branch]
        here = inner or here.get("additionalProperties") or next(iter(listed), nothing)
        or_null = [branch for branch in here.get("anyOf", []) if "$ref" in branch]
        one_of = [branch for branch in here.get("oneOf", []) if branch["$ref"].rsplit("/", 1)[-1] in tags]
        here = next(iter(or_null + one_of), here)
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].rsplit("/", 1)[-1]]
    return here
