"""Follows the output of the run in the controller, over connections that break."""

import io
import sys
import time

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.kubectl import Kubectl, pipe

PATIENCE = 600.0
"""Seconds to wait for a controller that does not answer: its pod may have to move to another node."""
PAUSE = 2.0


def follow(kubectl: Kubectl, controller: tuple[str, ...], patience: float = PATIENCE) -> int:
    """Show the output until the run has ended; returns Snakemake's exit code.

    controller: the command of the controller's process. patience: seconds to wait if the controller does not answer.

    Both a broken connection and a failed run end `kubectl exec` with an exit code. So this function asks the controller
    how the run ended; if it has not, the output continues from the byte at which it broke off.
    Raises VlmflowError if the controller does not answer for `patience`.
    """
    shown, told, answered = 0, -1, time.monotonic()
    while True:
        process = kubectl.talk_to_controller(*controller, "follow", "--from", str(shown))
        stdout = process.stdout
        assert isinstance(stdout, io.BufferedReader), "Popen buffers it"
        try:
            while block := stdout.read1(1 << 16):
                sys.stdout.buffer.write(block)
                sys.stdout.buffer.flush()
                shown += len(block)
                answered = time.monotonic()
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            pipe(process.stdin).close()
        said = _code(kubectl, controller)
        if said is not None:
            answered = time.monotonic()
            if said != "on":
                return 0 if said == "none" else int(said)
        if time.monotonic() - answered > patience:
            raise VlmflowError(
                f"the controller does not answer for {patience:.0f} s: {pipe(process.stderr).read().decode().strip()}",
                "the run continues; `kubectl get pods` shows the controller, `make cluster-log` follows it",
            )
        if told != shown:  # print it once, however long the controller does not answer
            told = shown
            print(
                "\nThe connection to the controller broke; trying again. The run continues.\n",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(PAUSE)


def _code(kubectl: Kubectl, controller: tuple[str, ...]) -> str | None:
    """Return the state of the run: its exit code, "on" or "none"; None if the controller does not answer."""
    process = kubectl.talk_to_controller(*controller, "code")
    said = process.communicate()[0].decode().strip()
    return said if process.returncode == 0 else None
