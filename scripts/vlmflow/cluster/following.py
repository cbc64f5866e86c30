"""The output of the run in the controller, followed over connections that break."""

import io
import sys
import time

from vlmflow.cluster.kubectl import Kubectl, pipe
from vlmflow.core.errors import VlmflowError

PATIENCE = 600.0
"""Seconds without a controller that answers: its pod may have to find another node."""
PAUSE = 2.0


def follow(kubectl: Kubectl, controller: tuple[str, ...], patience: float = PATIENCE) -> int:
    """Show the output until the run has ended; gives Snakemake's exit code.

    controller: the command of the controller's process. patience: seconds to wait for a controller that answers.

    A connection that breaks ends `kubectl exec` with a code of its own, as a failed run does: so the controller is
    asked how the run ended, and where it has not, the output goes on from the byte at which it broke off.
    Raises VlmflowError where nobody answers for `patience`.
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
        if told != shown:  # once, however long nobody answers
            told = shown
            print(
                "\nThe connection to the controller broke; trying again. The run continues.\n",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(PAUSE)


def _code(kubectl: Kubectl, controller: tuple[str, ...]) -> str | None:
    """Give what the controller says of the run: its code, "on" or "none"; None where nobody answers."""
    process = kubectl.talk_to_controller(*controller, "code")
    said = process.communicate()[0].decode().strip()
    return said if process.returncode == 0 else None
