"""A short job that looks from a partition's nodes at what a run needs there."""

import contextlib
import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from vlmflow import SCRIPTS
from vlmflow.core.errors import counted, printable
from vlmflow.remote.findings import TRIALS, Finding, check_folder
from vlmflow.remote.slurm import on_node
from vlmflow.remote.slurm.on_node import FirstNode
from vlmflow.remote.slurm.partitions import Partition
from vlmflow.remote.slurm.queue import SlurmError, ask, jobs
from vlmflow.remote.slurm.waiting import explain, will_not_start

MINUTES, MEM_MB = 5, 1_000
"""What the job asks for."""

PAUSE, LATENCY = 1.0, 30.0
"""Seconds between two looks; and until this machine must see what another one wrote."""

ANSWER_BYTES = 1 << 20
"""How much of the job's output is read."""

UNTRIED = {"see": "it was not tried"}

LITTLE_MB = 1_000
"""Less free space than this in TMPDIR or /dev/shm is worth a word."""


@dataclass(frozen=True)
class Answer:
    """What a job said; if nothing, fault says why. waits: whether it has not started."""

    said: FirstNode | None = None
    fault: str = ""
    waits: bool = False


class Probe:
    """One job in a partition, submitted at once; `answer` waits for it, and `remove` ends it."""

    def __init__(
        self, partition: Partition, account: str | None, folder: Path, folders: Sequence[Path], hub: str
    ) -> None:
        """Submit the job, on two nodes if the partition has them.

        account: None for the user's own. folder: the working directory. folders: those to try. hub: an address that
        must answer; "" for none.
        """
        self.partition = partition
        self.nodes = 2 if len(partition.nodes) > 1 and partition.max_nodes != 1 else 1
        name = f".doctor-{uuid.uuid4().hex[:8]}"
        self._output = folder / f"{name}.log"
        program = [sys.executable, "-m", on_node.__name__, "first", name, hub, *map(str, folders)]
        words = [
            *("sbatch", "--parsable", "--job-name=vlmflow-doctor", f"--partition={partition.name}", "--no-requeue"),
            *(f"--nodes={self.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", f"--mem={MEM_MB}"),
            *(f"--time={MINUTES}", f"--output={self._output}", f"--chdir={folder}"),
            *([f"--account={account}"] if account else []),
        ]
        script = f"#!/bin/sh\nexec env PYTHONPATH={shlex.quote(str(SCRIPTS))} PYTHONSAFEPATH=1 {shlex.join(program)}\n"
        self._fault, self._job = "", ""
        try:
            self._job = ask(*words, script=script).strip().split(";")[0]
        except SlurmError as error:
            self._fault = error.cause

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the job, and remove its output."""
        if self._job:
            with contextlib.suppress(SlurmError):  # it ends by itself in MINUTES
                ask("scancel", self._job)
        self._output.unlink(missing_ok=True)

    def answer(self, patience: float) -> Answer:
        """Wait up to `patience` seconds for the job to start, and then for its end.

        Raises SlurmError if Slurm stops answering.
        """
        if self._fault:
            return Answer(fault=self._fault)
        until = time.monotonic() + patience
        while (job := jobs().get(self._job)) is not None and job.is_active:
            if job.state == "PENDING" and will_not_start(job.reason):
                return Answer(fault=f"its job never starts: {explain(job.reason)}")
            if job.state == "PENDING" and time.monotonic() > until:
                return Answer(fault=f"it still waits after {patience:.0f} s: {explain(job.reason)}", waits=True)
            time.sleep(PAUSE)
        state = job.state if job is not None else "gone from the queue"
        return self._read(state)

    def _read(self, state: str) -> Answer:
        until = time.monotonic() + (LATENCY if state == "COMPLETED" else PAUSE)
        while not self._output.exists() and time.monotonic() < until:
            time.sleep(PAUSE)
        try:
            with self._output.open("rb") as file:
                text = file.read(ANSWER_BYTES)
        except OSError:
            where = "its node wrote no output into the working directory, or this machine does not see it"
            return Answer(fault=f"its job is {state}: {where}")
        for line in reversed(text.splitlines()):
            with contextlib.suppress(msgspec.DecodeError):
                return Answer(msgspec.json.decode(line, type=FirstNode))
        said = " ".join(text.decode(errors="replace").split())[-300:]
        return Answer(fault=f"its job is {state}: {printable(said) or 'it printed nothing'}")


def check_answer(partition: str, answer: Answer, names: Mapping[Path, str], nodes: int, hub: str) -> list[Finding]:
    """Turn a job's answer into findings.

    names: what each folder is, for people. nodes: those that the job had. hub: the address that was asked; "" for none.
    """
    what, said = f"jobs in {partition}", answer.said
    if answer.waits:
        step = "nothing, if the partition is busy; look again with more --patience, or when it is idle"
        return [Finding(what, "warn", f"not seen from inside: {answer.fault}", step)]
    if said is None:
        step = (
            "checkout, .venv and working directory must be on a file system that all nodes share, under the same path; "
            "if Slurm refused the job, its words say why"
        )
        return [Finding(what, "fail", answer.fault, step)]
    node = printable(said.node)
    findings = [Finding(what, "ok", f"{node} sees the checkout and starts its Python {printable(said.python)}")]
    findings += _folders(partition, said, names)
    findings += _second(partition, said, names, nodes)
    findings.append(_temporary(partition, said))
    if hub:
        findings.append(_hub(partition, hub, said.hub))
    return findings


def _folders(partition: str, said: FirstNode, names: Mapping[Path, str]) -> list[Finding]:
    findings = []
    for folder, name in names.items():
        if wrong := said.folders.get(str(folder), UNTRIED):
            wrong = {trial if trial in TRIALS else "write": printable(error) for trial, error in wrong.items()}
            step = f"the user of jobs must be able to write there: ls -ld {folder} on {printable(said.node)}"
            findings.append(check_folder(f"{name} in {partition}", wrong, said.user, step))
    if not any(finding.state == "fail" for finding in findings):
        found = f"{', '.join(names.values())}: writable as user {said.user}, with locks and renamed folders"
        findings.append(Finding(f"folders in {partition}", "ok", found))
    return findings


def _second(partition: str, said: FirstNode, names: Mapping[Path, str], nodes: int) -> list[Finding]:
    second, what = said.second, f"two nodes of {partition}"
    if second is None:
        step = "jobs must be able to run srun, scontrol and scancel: the executor starts stages and requeues by them"
        return [Finding(what, "fail", f"no step ran: {printable(said.second_fault)}", step)]
    other, findings = printable(second.node), []
    for folder, name in names.items():
        if said.folders.get(str(folder)):
            continue  # its fault has a finding
        for trial, error in second.folders.get(str(folder), UNTRIED).items():
            step = TRIALS["flock"][2] if trial == "flock" else "use a file system that all nodes share"
            found = f"{name}, from {other}, while {printable(said.node)} uses it: {printable(error)}"
            findings.append(Finding(what, "fail", found, step))
    if nodes == 1:
        findings.append(Finding(what, "warn", "not checked: a job there has one node", "nothing, for runs on one node"))
    elif not findings:
        found = f"{other} sees files, links and locks of {printable(said.node)}"
        findings.append(Finding(what, "ok", found))
    if second.signal:
        step = "trainers are told to save by a signal, and come again by scontrol requeue: jobs need Slurm's commands"
        findings.append(Finding(f"signals in {partition}", "fail", printable(second.signal), step))
    else:
        findings.append(Finding(f"signals in {partition}", "ok", f"a step on {other} gets SIGTERM"))
    return findings


def _temporary(partition: str, said: FirstNode) -> Finding:
    what, folder = f"TMPDIR in {partition}", printable(said.temporary)
    if said.temporary_fault:
        step = "name a folder with a shorter path on the nodes' own disks: export TMPDIR=/tmp before snakemake"
        return Finding(
            what, "fail", f"{folder}: no place for trainers' sockets: {printable(said.temporary_fault)}", step
        )
    found = f"{folder} has {said.temporary_mb / 1000:,.0f} GB free, /dev/shm {said.shared_memory_mb / 1000:,.0f} GB"
    if min(said.temporary_mb, said.shared_memory_mb) < LITTLE_MB:
        step = "trainers pass rows through /dev/shm, and write little into TMPDIR: name another one, if it fills up"
        return Finding(what, "warn", found, step)
    return Finding(what, "ok", found)


def _hub(partition: str, hub: str, fault: str) -> Finding:
    if fault:
        step = "let fetching stages run here (slurm.here: [fetch, pages]), or set HTTPS_PROXY or HF_ENDPOINT"
        return Finding(f"hub from {partition}", "fail", f"{hub}: {printable(fault)}", step)
    return Finding(f"hub from {partition}", "ok", f"{hub} answers")


def folders_of(working: Path, stores: Mapping[str, str]) -> dict[Path, str]:
    """Return the folders to try, each with what it is for people: the working directory and what the stores are in.

    A store that is not there yet is made by its first stage, in the nearest folder above it that is.
    """
    names: dict[Path, list[str]] = {working: ["the working directory"]}
    for name, store in stores.items():
        place = (working / store).absolute()
        while not place.is_dir():
            place = place.parent
        names.setdefault(place, []).append(f"stores.{name}")
    return {place: many[0] if len(many) == 1 else f"{many[0]} ({_more(many)})" for place, many in names.items()}


def _more(many: list[str]) -> str:
    return f"and {counted(len(many) - 1, 'store')} in it"
