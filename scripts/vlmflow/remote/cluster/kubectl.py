"""What a laptop does in the cluster through kubectl: commands in the controller, and files to and from its volumes.

If several people share a namespace, the environment variable VLMFLOW_INSTANCE names one's instance of vlmflow, on a
laptop and in the controller (k8s/base/controller.yaml): a suffix of names, and a label. Without it the namespace has
one vlmflow, whose objects have no suffix and no label. k8s/components/instance sets both.
"""

import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from vlmflow.remote.cluster import file_stream
from vlmflow.remote.cluster.file_stream import Broken, Refused, files_at, heard, receive, say, send, sizes_at
from vlmflow.remote.library import Progress, VlmflowError

log = logging.getLogger("vlmflow")

VARIABLE = "VLMFLOW_INSTANCE"
LABEL = "app.kubernetes.io/instance"
PART_OF = "app.kubernetes.io/part-of=vlmflow"

VOLUMES = ("/cache", "/outputs")
TARGETS = PurePosixPath("/outputs/targets")
"""The folder of the targets (default-storage-prefix of profiles/kubernetes)."""

FILE_STREAM = Path(file_stream.__file__).read_text()
"""A program that the controller's Python gets as text, because its image has none of our files."""

TRIES = 8
"""Streams in a row without new bytes after which copying fails."""
PAUSE = 2.0
"""Seconds before the second stream; each further pause is twice as long."""


def instance() -> str:
    """Return the name of the instance, or "".

    Raises VlmflowError if it cannot be part of an object's name.
    """
    name = os.environ.get(VARIABLE, "")
    if name and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", name):
        raise VlmflowError(
            f"{VARIABLE} is {name!r}, not a name of at most 30 lower-case letters, digits and dashes",
            f"unset {VARIABLE}, or export {VARIABLE}=NAME with the name in your copy of k8s/components/instance",
        )
    return name


def own_name(name: str) -> str:
    """Return the name of an object of k8s/ in this instance."""
    return f"{name}-{instance()}" if instance() else name


def short_name(name: str) -> str:
    """Return the name of an object in k8s/."""
    return name.removesuffix(f"-{instance()}") if instance() else name


def own_labels() -> dict[str, str]:
    """Return the labels of this instance's objects."""
    return {LABEL: instance()} if instance() else {}


def own_selector() -> str:
    """Return the selector of this instance's objects, which excludes those of other instances."""
    return f"{PART_OF},{LABEL}={instance()}" if instance() else f"{PART_OF},!{LABEL}"


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
        program = shutil.which(os.environ.get("KUBECTL", "kubectl"))
        if program is None:
            raise VlmflowError("kubectl is not installed", "install it, or set KUBECTL=/path/to/kubectl")
        self._command = [program, "--namespace", namespace]
        self._controller = (f"deployment/{own_name('controller')}", "--container=controller")
        self._next_step = f"run `vlmflow doctor --namespace {namespace}` to see what the cluster lacks"

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run one command and return its output. stdin: its input.

        Raises VlmflowError with kubectl's own message if it fails.
        """
        ended = subprocess.run([*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise VlmflowError(f"kubectl {arguments[0]}: {ended.stderr.strip()}", self._next_step)
        return ended.stdout

    def in_controller(self, *command: str) -> int:
        """Run a command in the controller with its output on ours; returns its exit code."""
        return subprocess.run([*self._command, "exec", *self._controller, "--", *command], check=False).returncode

    @contextmanager
    def into_controller(self, *command: str) -> Iterator[IO[bytes]]:
        """Run a command in the controller; the block writes to its standard input.

        Raises VlmflowError if it fails.
        """
        process = self.talk_to_controller(*command, stdout=None)
        try:
            yield pipe(process.stdin)
        except BrokenPipeError:
            pass  # the command's own message is the cause
        finally:
            message = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            cause = message or f"exit code {process.returncode}"
            raise VlmflowError(f"{self._controller[0]}: {cause}", self._next_step)

    def talk_to_controller(self, *command: str, stdout: int | None = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start a command in the controller with pipes for its standard input, output and error.

        stdout: None for our own.
        """
        words = [*self._command, "exec", "--stdin", *self._controller, "--", *command]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)


def get(kubectl: Kubectl, target: str, to: Path | str) -> None:
    """Copy a file or folder to this machine and check each file's SHA-256; bytes that are already here are kept.

    target: a target of the workflow (merged/RUN), or an absolute path on a volume.

    Raises VlmflowError if it does not exist, or the controller cannot be reached for minutes.
    """
    source, to = _on_volume(target), Path(to).resolve()
    with Progress(f"get {target}", 0, "bytes") as progress:

        def show(done: int, total: int) -> None:
            progress.total = progress.total or total
            progress.advance(max(0, done - progress.count))

        def stream() -> int:
            with _talk(kubectl, "send", source) as (give, take):
                say(give, sizes_at(to))
                return receive(to, take, show)

        _until_all_is_there(stream, lambda: sum(sizes_at(to).values()))
    log.info(f"copied {target} to {to}; every file has the digest of the original")


def put(kubectl: Kubectl, source: Path | str, to: str) -> None:
    """Copy a file or folder of this machine to a volume; the controller checks each file's SHA-256.

    to: an absolute path on a volume. Raises VlmflowError as `get` does.
    """
    target, source, there = _on_volume(to), Path(source).resolve(), 0
    try:
        total = sum(file.stat().st_size for file in files_at(source).values())
    except Refused as refused:
        raise VlmflowError(str(refused), "give a file, or a folder of files") from None
    with Progress(f"put {to}", total, "bytes") as progress:

        def show(sent: int) -> None:
            progress.advance(min(sent, max(0, total - progress.count)))

        def stream() -> int:
            nonlocal there
            with _talk(kubectl, "receive", target) as (give, take):
                sizes = heard(take)
                there = sum(sizes.values())
                progress.start_at(min(there, total))
                send(source, sizes, give, show)
                return int(heard(take)["wrong"])

        _until_all_is_there(stream, lambda: there)
    log.info(f"copied {source} to {to}; every file has the digest of the original")


def _on_volume(path: str) -> PurePosixPath:
    absolute = TARGETS / path
    if ".." in absolute.parts or not any(absolute.is_relative_to(volume) for volume in VOLUMES):
        raise VlmflowError(
            f"{path}: neither a target nor a path on a volume",
            "give a target (merged/RUN), or a path under /cache or /outputs",
        )
    return absolute


def _until_all_is_there(stream: Callable[[], int], bytes_there: Callable[[], int]) -> None:
    """Open streams until one ends with every digest right; each resumes where the last one broke off."""
    tries, before = 0, -1
    while True:
        try:
            wrong = stream()
            if not wrong:
                return
            cause = f"{wrong} files arrived with other bytes than those sent"
        except Broken as broken:
            cause = str(broken)
        now = bytes_there()
        tries, before = (0 if now > before >= 0 else tries + 1), now
        if tries >= TRIES:
            raise VlmflowError(cause, "`vlmflow doctor` shows what the cluster lacks; the same command resumes here")
        log.info(f"{cause}; resuming where it broke off")
        time.sleep(min(PAUSE * 2**tries, 60))


@contextmanager
def _talk(kubectl: Kubectl, action: str, path: PurePosixPath) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Run file_stream in the controller; the block gets the streams to it and from it.

    Raises VlmflowError with what it refused, and Broken if the connection broke.
    """
    process = kubectl.talk_to_controller("python", "-c", FILE_STREAM, action, str(path))
    streams, messages = (pipe(process.stdin), pipe(process.stdout)), list[bytes]()
    reader = threading.Thread(target=messages.extend, args=(pipe(process.stderr),), daemon=True)
    reader.start()
    broken: Exception | None = None
    try:
        yield streams
    except (OSError, Broken) as error:
        broken = error
    finally:
        for stream in streams:
            with suppress(OSError):  # the other side has ended first; its message is the cause
                stream.close()
        code = process.wait()
        reader.join(10)
        lines = b"".join(messages).decode(errors="replace").strip().splitlines()
        for line in lines:
            if line.startswith("refused: "):
                step = "fix that path, then run the same command again: it resumes from here"
                raise VlmflowError(line.removeprefix("refused: "), step)
    if broken or code:
        raise Broken(lines[-1] if lines else str(broken or f"exit code {code}"))
