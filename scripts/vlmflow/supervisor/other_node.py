"""The program of every node of a training but the first:

    python -m vlmflow.supervisor.other_node RUNS ATTEMPT NODE THREADS

RUNS: the folder with the run folders of a run, by stage and digest. ATTEMPT: the name of the attempt. NODE: the node's
number, from 1. THREADS: cores for its processes together.

It waits for the attempt's launch file, starts this node's trainers as that says, and reports how they ended. When the
launch file is removed, or after SIGTERM, it ends; its trainers save a checkpoint first if they are at work.

The launch file is what the first node tells the others. All of it is data: settings, which are checked as those of a
configuration, and paths; a node makes its own command from them. It and the reports are in the run folder, which every
node sees, and carry the attempt's name, so that a node of an earlier attempt finds nothing.
"""

import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.lease import Sign, newest
from vlmflow.supervisor.launch import Place, end, let_them_save, ranks_of, start
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import Training, from_data

ATTEMPT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""The name of an attempt; on a cluster it is that of a Kubernetes object."""

ENDPOINT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?:[0-9]{1,5}")
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,18}")

MOST_BYTES = 1_000_000
"""A launch file with the largest settings of DeepSpeed that a configuration may have takes less."""

MOST = 100_000
"""Of nodes, processes and sessions: beyond them a file is not ours."""

Order = Literal["train", "stacks", "stop"]
"""What the nodes are to do. stacks: let every trainer write where it is. stop: end the trainers."""


PAUSE = 0.5
"""Seconds between two looks at the launch file."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The launch file.

    session: the number of the start of trainers in this attempt, from 1. endpoint: host and port of node 0.
    resume: the checkpoint's name, or null. training: as `training_json.as_data` gives it.
    """

    attempt: str
    session: int
    order: Order
    endpoint: str
    resume: str | None
    training: dict[str, Any]

    @property
    def meeting(self) -> str:
        """The name under which the trainers of this session meet."""
        return f"{self.attempt}.{self.session}"


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node reports.

    session: the newest that it has seen. runs: whether its trainers run. code: torchrun's exit code, null without one.
    """

    session: int
    runs: bool
    code: int | None


def launch_file(run_folder: Path, attempt: str) -> Path:
    """Return where node 0 tells the others how to start. attempt: see `core.child_programs`."""
    return run_folder / f"launch-{attempt}.json"


def report_file(run_folder: Path, attempt: str, node: int) -> Path:
    """Return where a node tells node 0 how its trainers are. node: from 1."""
    return run_folder / f"launch-{attempt}.node-{node}.json"


def write_launch(run_folder: Path, launch: Launch) -> None:
    """Tell the other nodes how to start; the file replaces that of an earlier session."""
    write_account(launch_file(run_folder, launch.attempt), launch)


def read_launch(file: Path) -> tuple[Launch, Training] | None:
    """Read a launch file, and the training that it describes; None if it no longer exists.

    Raises VlmflowError if it is none, or its folder is not that of the training.
    """
    try:
        launch = msgspec.json.decode(_limited(file), type=Launch)
        if launch_file(file.parent, launch.attempt) != file or not ATTEMPT.fullmatch(launch.attempt):
            raise ValueError(f"it is of the attempt {launch.attempt!r:.80}")
        if not ENDPOINT.fullmatch(launch.endpoint):
            raise ValueError(f"endpoint: {launch.endpoint!r:.80}")
        if launch.resume is not None and not CHECKPOINT.fullmatch(launch.resume):
            raise ValueError(f"resume: {launch.resume!r:.80}")
        training = from_data(launch.training)
        if not all(1 <= number <= MOST for number in (training.nodes, training.processes, launch.session)):
            raise ValueError("nodes, processes and session must be 1 or more")
        if training.digest() != file.parent.name:
            raise ValueError("its training has another digest than this folder's name")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, VlmflowError) as error:
        raise VlmflowError(
            f"{file}: not a launch file of this version: {error!s:.500}",
            "all nodes must have the same version of vlmflow; then run the same command again",
        ) from None
    return launch, training


def read_report(run_folder: Path, attempt: str, node: int) -> Report | None:
    """Read a node's report; None if it has written none that can be read."""
    try:
        return msgspec.json.decode(_limited(report_file(run_folder, attempt, node)), type=Report)
    except (OSError, ValueError, RecursionError):
        return None


def _limited(file: Path) -> bytes:
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is not a file")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return content


def main() -> None:
    """Serve until the attempt is over. Ends with code 1 if the launch file is wrong, or SIGTERM came before."""
    runs, attempt, node, threads = sys.argv[1:]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"node {node}: %(message)s")
    if not ATTEMPT.fullmatch(attempt):
        sys.exit(f"{attempt!r:.80} is not the name of an attempt")
    try:
        if not OtherNode(Path(runs), attempt, int(node), int(threads)).serve():
            sys.exit(f"node {node}: ended by SIGTERM")
    except VlmflowError as error:
        sys.exit(f"node {node}: {error}")


class OtherNode:
    """One node of a training, which follows the launch file that node 0 writes."""

    def __init__(self, runs: Path, attempt: str, node: int, threads: int) -> None:
        """See the arguments of the module."""
        self._runs = runs
        self._attempt = attempt
        self._node = node
        self._threads = threads
        self._obeyed: tuple[int, Order] = (0, "stop")
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._reported = Report(0, False, None)
        self._ends = False
        self._told: set[int] = set()
        self._announced = ""

    def serve(self) -> bool:
        """Follow the launch file until it is removed, or SIGTERM came; returns whether it was removed.

        Raises VlmflowError if it is wrong.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        log.info(f"waiting for node 0 of attempt {self._attempt}")
        file = self._launch_file()
        while file and (orders := self._read(file)) is not None:
            if self._ends and (self._torchrun is None or self._torchrun.poll() is not None):
                break
            self._obey(*orders, RunFolder(file.parent))
            if self._ends and self._torchrun is not None:
                let_them_save(self._torchrun, self._told)
            self._report(file.parent)
            time.sleep(PAUSE)
        self._end_trainers()
        if file is None:
            return False
        if file.exists():
            self._report(file.parent)
            return False
        report_file(file.parent, self._attempt, self._node).unlink(missing_ok=True)
        log.info(f"attempt {self._attempt} is over")
        return True

    def _launch_file(self) -> Path | None:
        """Return the launch file, once it exists and node 0 lives; None after SIGTERM.

        A killed node 0 leaves its launch file. If a queue suspends its Job and lets it go on, the next one has the same
        attempt; so only a file counts beside which the lease of the run folder goes on. Node 0 gets that first, and
        then removes old launch files.
        """
        pattern = f"*/*/{launch_file(Path(), self._attempt).name}"
        seen: dict[Path, Sign | None] = {}
        while not self._ends:
            for file in self._runs.glob(pattern):
                with suppress(OSError):
                    sign = newest(file.parent)
                    if sign and not sign.released and sign != seen.setdefault(file, sign) and file.exists():
                        return file
            time.sleep(PAUSE)
        return None

    def _read(self, file: Path) -> tuple[Launch, Training] | None:
        """Return what the launch file says; None if it was removed. Raises VlmflowError if it is wrong."""
        while True:
            try:
                return read_launch(file)
            except OSError as error:  # on a network volume, for instance ESTALE as it is replaced
                if self._ends:
                    raise VlmflowError(f"{file}: {error}", "run the same command again") from None
                if str(error) != self._announced:
                    self._announced = str(error)
                    log.info(f"{file}: {error}; looking again")
                time.sleep(PAUSE)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self._ends = True
        if self._torchrun is not None:
            let_them_save(self._torchrun, self._told)

    def _obey(self, launch: Launch, training: Training, folder: RunFolder) -> None:
        if self._obeyed == (launch.session, launch.order) or (self._ends and launch.order == "train"):
            return
        self._obeyed = launch.session, launch.order
        if launch.order == "stacks":
            for process in ranks_of(self._torchrun).values() if self._torchrun else ():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)
            return
        self._end_trainers()
        if launch.order == "train":
            log.info(f"starting {counted(training.processes, 'trainer')}, session {launch.session} ({folder.path})")
            resume = folder.output / launch.resume if launch.resume else None
            role = Place(self._node, launch.endpoint, launch.meeting)
            self._torchrun = start(training, folder, resume, self._threads, role)
            self._told = set()

    def _end_trainers(self) -> None:
        if self._torchrun is not None and self._torchrun.poll() is None:
            log.info("ending the trainers")
            end(self._torchrun)

    def _report(self, run_folder: Path) -> None:
        """Tell node 0 how the trainers of its session ended, or that they run."""
        code = self._torchrun.poll() if self._torchrun else None
        report = Report(self._obeyed[0], self._torchrun is not None and code is None, code)
        if report != self._reported:
            try:
                write_account(report_file(run_folder, self._attempt, self._node), report)
            except OSError as error:  # a network volume may fail for a moment; the next look writes
                log.info(f"cannot report the state of this node to node 0 yet: {error}")
                return
            self._reported = report
            if code is not None:
                log.info(f"the trainers of session {report.session} ended with code {code}")


if __name__ == "__main__":
    main()
