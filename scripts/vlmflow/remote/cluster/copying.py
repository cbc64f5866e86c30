"""The instance of vlmflow, if several people share a namespace: a suffix of names, and a label.

The environment variable VLMFLOW_INSTANCE names it, on a laptop and in the controller (k8s/base/controller.yaml).
Without it the namespace has one vlmflow, whose objects have no suffix and no label. k8s/components/instance sets both.

Runs kubectl in one namespace, and commands in the controller.

Copies files and folders between this machine and the volumes of a cluster, through its controller.
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

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.remote.cluster import file_stream
from vlmflow.remote.cluster.file_stream import Broken, Refused, files_at, heard, receive, say, send, sizes_at

VARIABLE = "VLMFLOW_INSTANCE"
LABEL = "app.kubernetes.io/instance"
PART_OF = "app.kubernetes.io/part-of=vlmflow"


def instance() -> str:
    """Return the name of the instance, or "".

    Raises VlmflowError if it cannot be part of an object's name.
    """
    name = os.environ.get(VARIABLE, "")
    if name and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", name):
        what = f"{VARIABLE} is {name!r}, not a name of at most 30 lower-case letters, digits and dashes"
        raise VlmflowError(
            what, f"unset {VARIABLE}, or export {VARIABLE}=NAME with the name in your copy of k8s/components/instance"
        )
    return name


def named(name: str) -> str:
    """Return the name of an object of k8s/ in this instance."""
    return f"{name}-{instance()}" if instance() else name


def short(name: str) -> str:
    """Return the name of an object in k8s/."""
    return name.removesuffix(f"-{instance()}") if instance() else name


def labels() -> dict[str, str]:
    """Return the labels of this instance's objects."""
    return {LABEL: instance()} if instance() else {}


def selector() -> str:
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


log = logging.getLogger("vlmflow")

VOLUMES = ("/cache", "/outputs")
TARGETS = PurePosixPath("/outputs/targets")
"""The folder of the targets (default-storage-prefix of profiles/kubernetes)."""

TRIES = 8
"""Streams in a row without new bytes after which copying fails."""
PAUSE = 2.0
"""Seconds before the second stream; each further pause is twice as long."""


def get(kubectl: Kubectl, target: str, to: Path) -> None:
    """Copy a file or folder to this machine and check each file's SHA-256; bytes that are already here are kept.

    target: a target of the workflow (merged/RUN), or an absolute path on a volume.

    Raises VlmflowError if it does not exist, or the controller cannot be reached for minutes.
    """
    source, to = _on_volume(target), to.resolve()
    with Progress(f"get {target}", 0, "bytes") as progress:

        def stream() -> int:
            with _Talk(kubectl, "send", source) as (give, take):
                say(give, sizes_at(to))
                return receive(to, take, lambda done, total: _show(progress, done, total))

        _until_all_is_there(stream, lambda: sum(sizes_at(to).values()))
    log.info(f"copied {target} to {to}; every file has the digest of the original")


def put(kubectl: Kubectl, source: Path, to: str) -> None:
    """Copy a file or folder of this machine to a volume; the controller checks each file's SHA-256.

    to: an absolute path on a volume. Raises VlmflowError as `get` does.
    """
    place, source = _on_volume(to), source.resolve()
    total = sum(file.stat().st_size for file in _local_files(source).values())
    there = 0

    with Progress(f"put {to}", total, "bytes") as progress:

        def stream() -> int:
            nonlocal there
            with _Talk(kubectl, "receive", place) as (give, take):
                have = heard(take)
                there = sum(have.values())
                progress.start_at(min(there, total))
                send(source, have, _Counted(give, progress))
                wrong: int = heard(take)["wrong"]
                return wrong

        _until_all_is_there(stream, lambda: there)
    log.info(f"copied {source} to {to}; every file has the digest of the original")


def _local_files(source: Path) -> dict[str, Path]:
    try:
        return files_at(source)
    except Refused as refused:
        raise VlmflowError(str(refused), "give a file, or a folder of files") from None


def _on_volume(path: str) -> PurePosixPath:
    place = TARGETS / path
    if ".." in place.parts or not any(place.is_relative_to(volume) for volume in VOLUMES):
        raise VlmflowError(
            f"{path}: neither a target nor a path on a volume",
            "give a target (merged/RUN), or a path under /cache or /outputs",
        )
    return place


def _until_all_is_there(stream: Callable[[], int], have: Callable[[], int]) -> None:
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
        now = have()
        tries, before = (0 if now > before >= 0 else tries + 1), now
        if tries >= TRIES:
            raise VlmflowError(cause, "run `make doctor` to see what the cluster lacks; the same command resumes here")
        log.info(f"{cause}; resuming where it broke off")
        time.sleep(min(PAUSE * 2**tries, 60))


def _show(progress: Progress, done: int, total: int) -> None:
    if not progress.total:
        progress.total = total
    progress.advance(max(0, done - progress.count))


class _Counted:
    """A stream that reports written bytes to a progress."""

    def __init__(self, stream: IO[bytes], progress: Progress) -> None:
        self._stream, self._progress = stream, progress
        self.flush = stream.flush

    def write(self, block: bytes) -> None:
        self._stream.write(block)
        if len(block) > 1:
            self._progress.advance(min(len(block), max(0, self._progress.total - self._progress.count)))


class _Talk:
    """A file_stream process in the controller; as a context it gives the streams to it and from it.

    Raises VlmflowError with what it refused, and Broken if the connection broke.
    """

    def __init__(self, kubectl: Kubectl, action: str, path: PurePosixPath) -> None:
        program = Path(file_stream.__file__).read_text()
        self._process = kubectl.talk_to_controller("python", "-c", program, action, str(path))
        self._streams = pipe(self._process.stdin), pipe(self._process.stdout)
        self._said: list[bytes] = []
        stderr = pipe(self._process.stderr)
        self._reader = threading.Thread(target=lambda: self._said.extend(stderr), daemon=True)

    def __enter__(self) -> tuple[IO[bytes], IO[bytes]]:
        self._reader.start()
        return self._streams

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for stream in self._streams:
            with suppress(OSError):  # the other side has ended first; its message is the cause
                stream.close()
        code = self._process.wait()
        self._reader.join(10)
        said = b"".join(self._said).decode(errors="replace").strip()
        refused = next((line for line in said.splitlines() if line.startswith("refused: ")), "")
        if refused:
            step = "fix that path, then run the same command again: it resumes from here"
            raise VlmflowError(refused.removeprefix("refused: "), step)
        if isinstance(error, OSError | Broken) or (code and error is None):
            raise Broken(said.splitlines()[-1] if said else str(error or f"exit code {code}")) from None
