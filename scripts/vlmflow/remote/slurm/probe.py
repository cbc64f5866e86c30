"""A short job that looks from a partition's nodes at what a run needs there."""

import contextlib
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from vlmflow.remote.doctor import TRIALS, Finding, check_folder, last_of_form
from vlmflow.remote.library import SCRIPTS, counted, printable
from vlmflow.remote.slurm import on_node
from vlmflow.remote.slurm.on_node import FirstNode
from vlmflow.remote.slurm.partitions import Partition
from vlmflow.remote.slurm.queue import SlurmError, ask, jobs
from vlmflow.remote.slurm.waiting import reason_in_words, will_not_start

MINUTES, MEM_MB = 5, 1_000
"""What the job asks for."""

PAUSE, LATENCY = 1.0, 30.0
"""Seconds between two looks; and until this machine must see what another one wrote."""

ANSWER_BYTES = 1 << 20
"""How much of the job's output is read."""

UNTRIED = {"see": "it was not tried"}

LITTLE_MB = 1_000
"""Less free space than this in TMPDIR or /dev/shm is worth a word."""


class Probe:
    """One job in a partition, submitted at once; `answer` waits for it, and the end of the `with` block ends it."""

    def __init__(
        self, partition: Partition, account: str | None, folder: Path, folders: Sequence[Path], hub: str
    ) -> None:
        """Submit the job, on two nodes if the partition has them.

        account: None for the user's own. folder: the working directory. folders: those to try. hub: an address that
        must answer; "" for none.
        """
        self.partition, self.hub = partition, hub
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

    def answer(self, patience: float) -> FirstNode | Finding:
        """Wait up to `patience` seconds for the job to start, and then for its end.

        Returns what it printed, or a finding that says why it printed nothing of this form. Raises SlurmError if Slurm
        stops answering.
        """
        if self._fault:
            return self._unseen(self._fault)
        until = time.monotonic() + patience
        while (job := jobs().get(self._job)) is not None and job.is_active:
            if job.state == "PENDING" and will_not_start(job.reason):
                return self._unseen(f"its job never starts: {reason_in_words(job.reason)}")
            if job.state == "PENDING" and time.monotonic() > until:
                why = f"it still waits after {patience:.0f} s: {reason_in_words(job.reason)}"
                step = "nothing, if the partition is busy; look again with more --patience, or when it is idle"
                return Finding(f"jobs in {self.partition.name}", "warn", f"not seen from inside: {why}", step)
            time.sleep(PAUSE)
        return self._read(job.state if job is not None else "gone from the queue")

    def _read(self, state: str) -> FirstNode | Finding:
        until = time.monotonic() + (LATENCY if state == "COMPLETED" else PAUSE)
        while not self._output.exists() and time.monotonic() < until:
            time.sleep(PAUSE)
        try:
            with self._output.open("rb") as file:
                text = file.read(ANSWER_BYTES).decode(errors="replace")
        except OSError:
            where = "its node wrote no output into the working directory, or this machine does not see it"
            return self._unseen(f"its job is {state}: {where}")
        end = printable(" ".join(text.split())[-300:]) or "it printed nothing"
        return last_of_form(text, FirstNode) or self._unseen(f"its job is {state}: {end}")

    def _unseen(self, fault: str) -> Finding:
        step = (
            "checkout, .venv and working directory must be on a file system that all nodes share, under the same path; "
            "if Slurm refused the job, its words say why"
        )
        return Finding(f"jobs in {self.partition.name}", "fail", fault, step)


def folders_of(working: Path, stores: Mapping[str, str]) -> dict[Path, str]:
    """Return the folders to try, each with what it is for people: the working directory and what the stores are in.

    A store that is not there yet is made by its first stage, in the nearest folder above it that is.
    """
    names: dict[Path, list[str]] = {working: ["the working directory"]}
    for name, store in stores.items():
        folder = (working / store).absolute()
        while not folder.is_dir():
            folder = folder.parent
        names.setdefault(folder, []).append(f"stores.{name}")
    return {
        folder: f"{first} (and {counted(len(others), 'store')} in it)" if others else first
        for folder, (first, *others) in names.items()
    }


def check_nodes(partition: str, first: FirstNode, names: Mapping[Path, str], nodes: int, hub: str) -> Iterator[Finding]:
    """Yield what a job saw as findings.

    names: what each folder is, for people. nodes: those that the job had. hub: the address that was asked; "" for none.
    """
    detail = f"{printable(first.node)} sees the checkout and starts its Python {printable(first.python)}"
    yield Finding(f"jobs in {partition}", "ok", detail)
    yield from _check_folders(partition, first, names)
    yield from _check_second(partition, first, names, nodes)
    yield _check_temporary(partition, first)
    if hub and first.hub:
        step = "let fetching stages run here (slurm.here: [fetch, pages]), or set HTTPS_PROXY or HF_ENDPOINT"
        yield Finding(f"hub from {partition}", "fail", f"{hub}: {printable(first.hub)}", step)
    elif hub:
        yield Finding(f"hub from {partition}", "ok", f"{hub} answers")


def _check_folders(partition: str, first: FirstNode, names: Mapping[Path, str]) -> list[Finding]:
    findings = []
    for folder, name in names.items():
        if errors := first.folders.get(str(folder), UNTRIED):
            errors = {trial if trial in TRIALS else "write": printable(error) for trial, error in errors.items()}
            step = f"the user of jobs must be able to write there: ls -ld {folder} on {printable(first.node)}"
            findings.append(check_folder(f"{name} in {partition}", errors, first.user, step))
    if not any(finding.state == "fail" for finding in findings):
        detail = f"{', '.join(names.values())}: writable as user {first.user}, with locks and renamed folders"
        findings.append(Finding(f"folders in {partition}", "ok", detail))
    return findings


def _check_second(partition: str, first: FirstNode, names: Mapping[Path, str], nodes: int) -> list[Finding]:
    second, row = first.second, f"two nodes of {partition}"
    if second is None:
        step = "jobs must be able to run srun, scontrol and scancel: the executor starts stages and requeues by them"
        return [Finding(row, "fail", f"no step ran: {printable(first.second_fault)}", step)]
    other, findings = printable(second.node), []
    for folder, name in names.items():
        if first.folders.get(str(folder)):
            continue  # its fault has a finding
        for trial, error in second.folders.get(str(folder), UNTRIED).items():
            step = TRIALS["flock"][2] if trial == "flock" else "use a file system that all nodes share"
            detail = f"{name}, from {other}, while {printable(first.node)} uses it: {printable(error)}"
            findings.append(Finding(row, "fail", detail, step))
    if nodes == 1:
        findings.append(Finding(row, "warn", "not checked: a job there has one node", "nothing, for runs on one node"))
    elif not findings:
        findings.append(Finding(row, "ok", f"{other} sees files, links and locks of {printable(first.node)}"))
    if second.signal:
        step = "trainers are told to save by a signal, and come again by scontrol requeue: jobs need Slurm's commands"
        findings.append(Finding(f"signals in {partition}", "fail", printable(second.signal), step))
    else:
        findings.append(Finding(f"signals in {partition}", "ok", f"a step on {other} gets SIGTERM"))
    return findings


def _check_temporary(partition: str, first: FirstNode) -> Finding:
    row, folder = f"TMPDIR in {partition}", printable(first.temporary)
    if first.temporary_fault:
        step = "name a folder with a shorter path on the nodes' own disks: export TMPDIR=/tmp before snakemake"
        detail = f"{folder}: no place for trainers' sockets: {printable(first.temporary_fault)}"
        return Finding(row, "fail", detail, step)
    detail = f"{folder} has {first.temporary_mb / 1000:,.0f} GB free, /dev/shm {first.shared_memory_mb / 1000:,.0f} GB"
    if min(first.temporary_mb, first.shared_memory_mb) < LITTLE_MB:
        step = "trainers pass rows through /dev/shm, and write little into TMPDIR: name another one, if it fills up"
        return Finding(row, "warn", detail, step)
    return Finding(row, "ok", detail)
