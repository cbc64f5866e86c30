"""Programs in an environment of their own: packages that must not be resolved together with those that train.

`make env-NAME` installs `envs/NAME.lock` into `.venv-NAME`; the image of that name has it elsewhere, and says where
(`VLMFLOW_VENV_NAME`). Such a program imports its packages, the standard library, and modules of ours that need nothing
else. It reads one JSON value on its standard input and writes one on its standard output (`own_program`).
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

from vlmflow import CHECKOUT
from vlmflow.core.child_environment import child_environment
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.keys import without_keys
from vlmflow.core.own_program import SAID_WHY
from vlmflow.core.printable import printable
from vlmflow.core.process import bound_to_this_process, import_path

EnvironmentName = Literal["track", "search"]


def python_of(name: EnvironmentName) -> Path:
    """Return the interpreter of an environment.

    Raises VlmflowError with the command that installs it if it is missing.
    """
    folder = Path(os.environ.get(f"VLMFLOW_VENV_{name.upper()}") or CHECKOUT / f".venv-{name}")
    python = folder / "bin" / "python"
    if not python.is_file():
        raise VlmflowError(f"{folder}: the environment `{name}` is not installed", f"make env-{name}")
    return python


def ask(
    name: EnvironmentName,
    module: str,
    question: Any,
    env: dict[str, str] | None = None,
    also: Sequence[str] = (),
    limit: float | None = None,
) -> Any:
    """Run a module in an environment with a JSON value as its input, and return its answer.

    env: variables that it gets besides those of every program; also: names of this process's own that it gets, too
    (`child_environment`). What it writes to its standard error passes through, without keys. It ends with this process.
    limit: seconds after which it is killed.
    Raises VlmflowError if the environment is missing, or if the program fails: the error that it raised, or else its
    last line as the cause. Raises PassingError if a signal ended it, or the limit.
    """
    process = subprocess.Popen(
        [str(python_of(name)), "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(*also) | {"PYTHONPATH": import_path()} | (env or {}),
        preexec_fn=bound_to_this_process(),
    )
    assert process.stdin is not None  # for mypy: all three are pipes
    assert process.stdout is not None
    assert process.stderr is not None
    log_tail: deque[str] = deque(maxlen=20)
    relay = threading.Thread(target=_relay, args=(process.stderr, log_tail))
    relay.start()
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit, end) if limit is not None else None
    if timer:
        timer.start()
    with contextlib.suppress(BrokenPipeError):  # it ended before it read everything: its exit code and words say why
        process.stdin.write(json.dumps(question).encode())
        process.stdin.close()
    answer = process.stdout.read()
    relay.join()
    code = process.wait()
    if timer:
        timer.cancel()
    if late.is_set() and code < 0:
        raise PassingError(
            f"{module}: it did not end within {limit:g} seconds, so it was killed",
            "see that the server it talks to answers; it said:\n" + ("\n".join(log_tail) or "nothing"),
        )
    if code == SAID_WHY and answer:
        why = json.loads(answer)
        raise (PassingError if why["passing"] else VlmflowError)(_shown(why["cause"]), _shown(why["next_step"]))
    if code:
        cause = f"signal {-code} ended it" if code < 0 else log_tail[-1] if log_tail else f"it ended with code {code}"
        raise (PassingError if code < 0 else VlmflowError)(
            f"{module}: {cause}", "see what it said:\n" + ("\n".join(log_tail) or "nothing")
        )
    return json.loads(answer)


def _relay(source: IO[bytes], last: deque[str]) -> None:
    """Show a program's messages as they come, and keep the last ones."""
    for line in source:
        for part in line.decode(errors="replace").splitlines():
            last.append(_shown(part.rstrip().expandtabs()))
            print(last[-1], file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    """Return a text of a program for terminals and logs: it may repeat what a server said, or quote a key."""
    return printable(without_keys(text))
