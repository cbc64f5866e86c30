"""Commands that report their output if they fail, and locks for what all processes of the user share."""

import contextlib
import fcntl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.paths import CACHE
from vlmflow.core.errors import VlmflowError


def run(*argv: object, input: str | None = None, log: Path | None = None, **options: object) -> str:
    """Run a command to its end and give its standard output.

    log: a file that gets all output as it comes, for commands that take minutes.
    Raises VlmflowError with the end of what the command printed if it fails.
    """
    words = [str(word) for word in argv]
    if log is not None:
        with log.open("a") as out:
            code = subprocess.run(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, **options).returncode
        said = log.read_text(errors="replace")
    else:
        done = subprocess.run(words, input=input, capture_output=True, text=True, **options)
        code, said = done.returncode, done.stderr or done.stdout
    if code:
        tail = "\n".join(said.strip().splitlines()[-15:])
        raise VlmflowError(f"{' '.join(words[:6])} ended with {code}:\n{tail}", f"see {log}" if log else "read above")
    return "" if log is not None else done.stdout


def wait_for(what: str, check: Callable[[], object], limit: float = 60.0, pause: float = 0.05) -> object:
    """Call check until it returns something true, and return that; an exception means not yet.

    Between two calls it waits at least four times as long as a call took: each kubectl costs a tenth of a second.

    limit, pause: seconds. Raises VlmflowError after the limit, with the last exception.
    """
    end, last = time.monotonic() + limit, None
    while (begun := time.monotonic()) < end:
        try:
            if found := check():
                return found
        except Exception as error:
            last = error
        time.sleep(max(pause, 4 * (time.monotonic() - begun)))
    raise VlmflowError(f"{what}: not so after {limit:.0f} s ({last})", "read the logs of the cluster's parts")


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Wait for the lock `what` and hold it; a process that dies releases it."""
    locks = CACHE / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / what).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
