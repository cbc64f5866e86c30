"""What is measured of a model once, in a child process with limits, and kept in the user's cache.

An estimate that finds it there needs no torch.
"""

import hashlib
import logging
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import user_cache, whole_file
from vlmflow.swift.quick_imports import quick_imports

log = logging.getLogger("vlmflow")

Found = TypeVar("Found")

PACKAGES = ("torch", "transformers", "peft")
"""Packages whose versions decide what is measured."""

CODE = ("fake_pass.py", "meta_shape.py", "picture_pass.py", "../swift/meta_model.py", "../config/model_types.json")


def measured(by: str, given: msgspec.Struct, kind: type[Found]) -> Found:
    """Return what the function `measure` of a module returns: from the user's cache, or measured now.

    by: the module's name. given: the function's argument. kind: the type of its result.

    Raises VlmflowError if it fails: with the sizes of a foreign file, in foreign code.
    """
    found: Found = _measured(by, msgspec.json.encode(given), type(given), kind)  # type: ignore[arg-type]
    return found


@cache
def _measured(by: str, given: bytes, type_of_given: Any, kind: Any) -> Any:
    name = by.rpartition(".")[2]
    file = user_cache() / "passes" / f"{name}-{hashlib.sha256(given + _made_by()).hexdigest()}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, RecursionError):
        log.info(f"measuring the model ({name}) on tensors without data; once for a model and a training mode")
    with quick_imports():
        from vlmflow.swift.limited_child import limited

        measure = import_module(by).measure  # imports torch, which takes seconds
    found = limited(lambda: dict(msgspec.to_builtins(measure(msgspec.json.decode(given, type=type_of_given)))))
    try:
        if why := found.get("failed"):
            raise ValueError(why)
        checked = msgspec.convert(found, kind)
    except (ValueError, msgspec.ValidationError) as error:  # such as a size that is a text
        raise VlmflowError(
            f"a model of the sizes in config.json fails: {error}",
            "take a model with the files that its owner published; to train it in any case, set "
            "runs.NAME.estimate: ignore",
        ) from None
    try:
        with whole_file(file) as content:
            content.write(msgspec.json.encode(found))
    except OSError as error:
        log.info(f"it is not kept for the next estimate: {error}")
    return checked


@cache
def _made_by() -> bytes:
    """Return the code that measures, and the versions of the packages that it runs."""
    code = b"".join(Path(__file__).parent.joinpath(name).read_bytes() for name in CODE)
    return code + " ".join(map(version, PACKAGES)).encode()
