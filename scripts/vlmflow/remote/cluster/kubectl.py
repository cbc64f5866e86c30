"""Runs kubectl in one namespace, and commands in the controller."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.instance import named


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a stream of a process that was started with a pipe for it."""
    assert stream is not None, "the process was started without this pipe"
    return stream


class Kubectl:
    """kubectl in one namespace. KUBECONFIG selects the cluster, KUBECTL another command than kubectl.

    Raises VlmflowError if there is no kubectl, or VLMFLOW_INSTANCE is not a valid name.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        found = shutil.which(os.environ.get("KUBECTL", "kubectl"))
        if found is None:
            raise VlmflowError("kubectl is not installed", "install it, or set KUBECTL=/path/to/kubectl")
        self._command = [found, "--namespace", namespace]
        self._controller = (f"deployment/{named('controller')}", "--container=controller")

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run one command and return its output. stdin: its input.

        Raises VlmflowError with kubectl's own message if it fails.
        """
        ended = subprocess.run([*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise VlmflowError(f"kubectl {arguments[0]}: {ended.stderr.strip()}", self.next_step)
        return ended.stdout

    def in_controller(self, *command: str) -> int:
        """Run a command in the controller with its output on ours; returns its exit code."""
        return subprocess.run([*self._command, "exec", *self._controller, "--", *command], check=False).returncode

    @contextmanager
    def into_controller(self, *command: str) -> Iterator[IO[bytes]]:
        """Run a command in the controller; the block writes to its standard input.

        Raises VlmflowError if it fails.
        """
        arguments = [*self._command, "exec", "--stdin", *self._controller, "--", *command]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            yield pipe(process.stdin)
        except BrokenPipeError:
            pass  # the command's own message is the cause
        finally:
            said = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            raise VlmflowError(f"{self._controller[0]}: {said or f'exit code {process.returncode}'}", self.next_step)

    def talk_to_controller(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the controller with pipes for its standard input, output and error."""
        arguments = [*self._command, "exec", "--stdin", *self._controller, "--", *command]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def next_step(self) -> str:
        """What to do when a command fails."""
        return f"run `make doctor NAMESPACE={self.namespace}` to see what the cluster lacks"
