"""The kubectl command, with arguments as lists."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from vlmflow.cluster.instance import named
from vlmflow.core.errors import VlmflowError


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Give a stream of a process that was begun with a pipe for it."""
    assert stream is not None, "the process has no pipe there"
    return stream


class Kubectl:
    """kubectl in one namespace; which cluster is told by KUBECONFIG, as ever. KUBECTL names another command.

    Raises VlmflowError where there is no kubectl, or VLMFLOW_INSTANCE is no name.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        found = shutil.which(os.environ.get("KUBECTL", "kubectl"))
        if found is None:
            raise VlmflowError("kubectl is not there", "install it, or name it: KUBECTL=/path/to/kubectl")
        self._command = [found, "--namespace", namespace]
        self._controller = (f"deployment/{named('controller')}", "--container=controller")

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run one command and give what it wrote. stdin: what it reads.

        Raises VlmflowError with kubectl's own message where it fails.
        """
        ended = subprocess.run([*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise VlmflowError(f"kubectl {arguments[0]}: {ended.stderr.strip()}", self.next_step)
        return ended.stdout

    def in_controller(self, *command: str) -> int:
        """Run a command in the controller, with our output; gives its exit code."""
        return subprocess.run([*self._command, "exec", *self._controller, "--", *command], check=False).returncode

    @contextmanager
    def into_controller(self, *command: str) -> Iterator[IO[bytes]]:
        """Run a command in the controller that reads what the block writes.

        Raises VlmflowError where it fails.
        """
        arguments = [*self._command, "exec", "--stdin", *self._controller, "--", *command]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            yield pipe(process.stdin)
        except BrokenPipeError:
            pass  # what the command said is the cause
        finally:
            said = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            raise VlmflowError(f"{self._controller[0]}: {said or f'exit code {process.returncode}'}", self.next_step)

    def talk_to_controller(self, *command: str) -> subprocess.Popen[bytes]:
        """Begin a command in the controller that is written to and read from; its complaints are shown as they come."""
        arguments = [*self._command, "exec", "--stdin", *self._controller, "--", *command]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def next_step(self) -> str:
        """What to do when a command fails."""
        return f"`make doctor NAMESPACE={self.namespace}` says what the cluster lacks"
