"""The nodes that train together, as node 0 sees them; a training on one node has no others.

On a cluster the others are pods that wait for this one's launch file. Without one they are processes of this machine,
which run the same program.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vlmflow.core import child_programs
from vlmflow.core.child_programs import child_environment
from vlmflow.core.errors import log
from vlmflow.core.patience import Waiting
from vlmflow.core.processes import bound_to_this_process, import_path
from vlmflow.supervisor import other_node
from vlmflow.supervisor.launch import ALONE, Place
from vlmflow.supervisor.other_node import Launch, Order, Report, read_report, write_launch
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import Training, as_data
from vlmflow.swift.child_process import visible_gpus

SETTLE = 10.0
"""Seconds in which the trainers of other nodes end by themselves when these have failed: most notice it at once."""

FOR_END = 60.0
"""Seconds for other nodes on this machine to end their trainers, and to end themselves."""

FOR_ANSWER = 300.0
"""Seconds for nodes of a cluster to end their trainers. One that does not answer is probably lost: the
cluster notices that after a minute or more, and ends this pod as well. Its training is then disrupted, and has not
failed."""

FOR_ANSWER_AFTER_SIGNAL = 30.0
"""Seconds for nodes of a cluster to end their trainers, when this pod must end anyway."""


class Group:
    """The other nodes of a training."""

    def __init__(self, training: Training, folder: RunFolder, threads: int) -> None:
        """threads: cores for all processes of this node, or of this machine if it has all nodes.

        others: the numbers of the other nodes.
        """
        self.is_local = child_programs.NODE_0 not in os.environ
        self.threads = max(1, threads // training.nodes) if self.is_local else threads
        self._training = training
        self._folder = folder
        self._attempt = f"local-{uuid.uuid4().hex[:12]}" if self.is_local else os.environ[child_programs.ATTEMPT]
        self.others = range(1, training.nodes)
        self._launch: Launch | None = None
        self._here: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: list[int] = []
        self._looked = 0.0

    def begin(self, resume: Path | None) -> Place:
        """Let the others start their trainers; returns the place of this node among them.

        resume: the checkpoint to resume from.
        """
        if not self.others:
            return ALONE
        self._lost = []
        session = self._launch.session + 1 if self._launch else 1
        self._launch = launch = Launch(
            attempt=self._attempt,
            session=session,
            order="train",
            endpoint=self._endpoint(),
            resume=resume.name if resume else None,
            training=as_data(self._training),
        )
        self.write("train")
        for node in self.others if self.is_local else ():
            if node not in self._here:
                self._here[node] = self._start_here(node)
        return Place(0, launch.endpoint, launch.meeting)

    def lost(self) -> list[int]:
        """Return the nodes whose trainers have failed in this session. It looks once a second."""
        if time.monotonic() - self._looked >= 1:
            self._looked = time.monotonic()
            self._lost = [node for node in self.others if self._failed(node)]
        return self._lost

    def still_running(self) -> list[int]:
        """Return the nodes whose trainers still run some seconds after those of this node have failed."""
        give_up = time.monotonic() + SETTLE
        while (running := list(filter(self._may_run, self.others))) and time.monotonic() < give_up:
            time.sleep(0.1)
        return running

    def stop(self, signalled: bool) -> None:
        """End the other nodes' trainers, and wait until they have ended: they must write nothing any more.

        signalled: whether this process must end, too.
        """
        self.write("stop")
        begun, warned = Waiting(), False
        on_cluster = FOR_ANSWER_AFTER_SIGNAL if signalled else FOR_ANSWER
        while silent := list(filter(self._may_run, self.others)):
            waited = begun.seconds()
            if waited > (FOR_END if self.is_local else on_cluster):
                return
            if waited > FOR_ANSWER_AFTER_SIGNAL and not warned:
                warned = True
                log.warning(f"waiting for an answer of nodes that may be lost: {', '.join(map(str, silent))}")
            time.sleep(0.2)

    def end(self) -> None:
        """End the other nodes."""
        _remove_files(self._folder)
        for process in self._here.values():
            try:
                process.wait(FOR_END)
            except subprocess.TimeoutExpired:
                process.kill()

    def write(self, order: Order) -> None:
        """Write an order. One to stop must not hide why the trainers failed: an error of the volume is only logged."""
        if self._launch is not None:
            self._launch = msgspec.structs.replace(self._launch, order=order)
            try:
                write_launch(self._folder.path, self._launch)
            except OSError as error:
                if order == "train":
                    raise
                log.warning(f"the other nodes do not learn that they are to {order}: {error}")

    def _failed(self, node: int) -> bool:
        report = self._report(node)
        return self._has_ended(node) or (report is not None and bool(report.code))

    def _may_run(self, node: int) -> bool:
        report = self._report(node)
        return not self._has_ended(node) and (report is None or report.runs)

    def _report(self, node: int) -> Report | None:
        """Return what a node reported of this session."""
        report = read_report(self._folder.path, self._attempt, node)
        return report if report and self._launch and report.session == self._launch.session else None

    def _has_ended(self, node: int) -> bool:
        return node in self._here and self._here[node].poll() is not None

    def _endpoint(self) -> str:
        if not self.is_local:
            return f"{os.environ[child_programs.NODE_0]}:{os.environ.get(child_programs.PORT_OF, child_programs.PORT)}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"127.0.0.1:{free.getsockname()[1]}"

    def _start_here(self, node: int) -> subprocess.Popen[bytes]:
        """Start another node on this machine, with GPUs of its own."""
        runs = str(self._folder.path.absolute().parents[1])
        words = [runs, self._attempt, str(node), str(self.threads)]
        processes = self._training.processes
        gpus = visible_gpus()[node * processes : (node + 1) * processes] if self._training.device == "cuda" else []
        return subprocess.Popen(
            [sys.executable, "-m", other_node.__name__, *words],
            env=child_environment()
            | {"PYTHONPATH": import_path()}
            | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            start_new_session=True,  # as for the trainers: Ctrl-C reaches them through us
            preexec_fn=bound_to_this_process(signal.SIGTERM),
        )


@contextmanager
def group_of(training: Training, folder: RunFolder, threads: int) -> Iterator[Group]:
    """Yield the group of a training whose run folder is held; the other nodes end with the block.

    threads: as `Group` takes it.
    """
    _remove_files(folder)  # those of an attempt that was killed
    group = Group(training, folder, threads)
    try:
        yield group
    finally:
        group.end()


def _remove_files(folder: RunFolder) -> None:
    """Remove launch files and reports. Launch files come first: without one, a node that ends removes its report."""
    for file in sorted(folder.path.glob("launch-*.json"), key=lambda file: ".node-" in file.name):
        file.unlink(missing_ok=True)
