"""The trainer's worker, which records every call of transformers that has an argument about trusting remote code.

Started instead of the worker, with the same arguments; the file in RECORD gets a line per function and value.
"""

import os
import sys
from types import CodeType, FrameType
from typing import Any

import swift  # noqa: F401 (imported before the record begins, which would slow it down)

from vlmflow.in_trainer import process

NAME = "trust_remote_code"
VARIABLE_ARGUMENTS, VARIABLE_KEYWORDS = 0x04, 0x08
"""Flags of code objects (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)."""

taking: dict[CodeType, tuple[bool, str | None]] = {}
recorded: set[str] = set()


def takes(code: CodeType) -> tuple[bool, str | None]:
    """Return whether a function of transformers has the argument, and the name of its `**` parameter."""
    if "/transformers/" not in code.co_filename:
        return False, None
    count = code.co_argcount + code.co_kwonlyargcount
    further = None
    if code.co_flags & VARIABLE_KEYWORDS:
        further = code.co_varnames[count + bool(code.co_flags & VARIABLE_ARGUMENTS)]
    return NAME in code.co_varnames[:count], further


def record(frame: FrameType, event: str, argument: Any) -> None:
    """Record the value of the argument, once for each function and value."""
    if event != "call":
        return
    code = frame.f_code
    named, further = taking.get(code) or taking.setdefault(code, takes(code))
    if not named and not further:
        return
    given = frame.f_locals if named else frame.f_locals[further]
    if NAME in given and (line := f"{code.co_qualname} {given[NAME]}\n") not in recorded:
        recorded.add(line)
        with open(os.environ["VLMFLOW_TEST_RECORD"], "a") as file:
            file.write(line)


if __name__ == "__main__":
    sys.setprofile(record)
    process.main()
