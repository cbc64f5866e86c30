"""The other side of `own_environment.ask`: a program reads one JSON value, and answers with one.

Only the standard library is imported here: such a program runs in another environment.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vlmflow.core.errors import PassingError, VlmflowError

SAID_WHY = 3
"""The exit code of a program whose answer is a failure: {"cause": …, "next_step": …, "passing": …}."""


def answer_with(main: Callable[[Any], Any]) -> None:
    """Call `main` with the value on the standard input, and write what it returns to the standard output.

    A VlmflowError of `main` becomes the answer, and `ask` raises it again. Whatever else the process prints, also a
    library below Python, goes to the standard error, where people see it.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        try:
            json.dump(main(json.load(sys.stdin)), answer)
        except VlmflowError as error:
            passing = isinstance(error, PassingError)
            json.dump({"cause": error.cause, "next_step": error.next_step, "passing": passing}, answer)
            sys.exit(SAID_WHY)
