"""The lists of `vlmflow status`: this user's jobs in Slurm, and the Jobs of a namespace of Kubernetes, a line each."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vlmflow.remote.cluster.api import Object, Refused, connect
from vlmflow.remote.cluster.groups import KINDS, job_of, nodes_of
from vlmflow.remote.cluster.kubectl import own_selector
from vlmflow.remote.job import LINES, last_lines, newest_progress
from vlmflow.remote.kubernetes.job_shape import RULE, words_of
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.outcome import by_node, judge_pods, read_time
from vlmflow.remote.kubernetes.waiting import ClusterState, explain
from vlmflow.remote.library import VlmflowError, clock, printable
from vlmflow.remote.slurm.queue import QueuedJob, SlurmError, ask, jobs
from vlmflow.remote.slurm.waiting import reason_in_words, starts_by_itself

PATIENCE = 10.0
"""Seconds to retry the API of Kubernetes: a person waits for this answer."""

STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED"), "waiting"),
    **dict.fromkeys(("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"), "held"),
    **dict.fromkeys(("SIGNALING", "RESIZING"), "running"),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), "ending"),
    "CONFIGURING": "starting",
}
"""Slurm's words for a job that has not ended, in ours; the others are the same in small letters."""


@dataclass(frozen=True)
class Running:
    """What runs in one place. jobs: of each its texts by their names. none: what to say if there is none."""

    jobs: list[dict[str, str]]
    none: str = ""

    @property
    def lines(self) -> list[str]:
        """A line for each job, or one that says why there is none."""
        return in_columns([list(job.values()) for job in self.jobs]) or [self.none] * bool(self.none)


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row. The columns are aligned, but for the last, of which each cell keeps its width."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def of_kubernetes(namespace: str, multi_node: str, optional: bool) -> Running:
    """Return the namespace's Jobs, the oldest first, or why there are none.

    multi_node: how several pods train together (`cluster.multi_node`). optional: whether a machine without a
    configured cluster has nothing to say.

    Raises VlmflowError if the API server refuses.
    """
    try:
        client = connect(lambda text: print(text, file=sys.stderr), PATIENCE)
    except VlmflowError as error:
        return Running([], "" if optional else error.cause)
    try:
        rows = _jobs_of(Namespace(client, namespace, KINDS[multi_node]))
    except VlmflowError as error:
        return Running([], error.cause)
    except Refused as error:
        if not error.status:
            return Running([], f"no cluster answers: {error}")
        raise VlmflowError(f"namespace {namespace}: {error}", "`vlmflow doctor` shows what the cluster lacks") from None
    return Running(rows, f"namespace {namespace} has no Job of vlmflow")


def _jobs_of(cluster: Namespace) -> list[dict[str, str]]:
    jobs = sorted(cluster.jobs(f"{own_selector()},{RULE}"), key=lambda job: job["metadata"]["creationTimestamp"])
    if not jobs:
        return []
    pods: dict[str, list[Object]] = {}
    for pod in cluster.pods(f"{own_selector()},{RULE}"):
        pods.setdefault(job_of(pod), []).append(pod)
    state = ClusterState.of(cluster)
    return [_job_row(cluster, job, pods.get(job["metadata"]["name"], []), state) for job in jobs]


def _job_row(cluster: Namespace, job: Object, own: list[Object], state: ClusterState) -> dict[str, str]:
    now, pods = cluster.now(), by_node(own)
    outcome = judge_pods(job, own, {}, now)
    detail = outcome.ended.cause
    if outcome.state == "waiting":
        detail = explain(job, own, state).why
    elif outcome.state == "running":
        detail = newest_progress(cluster.log_end(pods[0]["metadata"]["name"], LINES, nodes_of(job)))
    since = clock((now - read_time(job["metadata"]["creationTimestamp"])).total_seconds())
    where = ",".join(pod.get("spec", {}).get("nodeName", "-") for pod in pods.values()) or "-"
    return {"job": words_of(job), "state": outcome.state, "age": since, "where": where, "detail": detail}


def has_slurm() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def of_slurm(folder: Path) -> Running:
    """Return the jobs that vlmflow submitted and that have not ended, or why there is none.

    folder: the working directory of Snakemake; of a job of another one the folder is shown, too.
    """
    try:
        ours = [job for job in jobs().values() if job.words and job.is_active]
        places = _places() if ours else {}
        rows = [_row(job, *places.get(job.id, ("", "")), folder) for job in sorted(ours, key=lambda job: job.submitted)]
    except SlurmError as error:
        return Running([], f"Slurm does not answer: {printable(error.cause)}")
    return Running(rows, "Slurm has no job of vlmflow")


def _places() -> dict[str, tuple[str, str]]:
    """Return when Slurm expects each job of this user to start, as Slurm writes it, and the job's folder, by id."""
    answer = ask("squeue", "--all", "--noheader", f"--user={os.getuid()}", "--format=%i|%S|%Z")
    fields = (line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2)
    return {job.strip(): (start, where) for job, start, where in fields}


def _row(job: QueuedJob, start: str, where: str, folder: Path) -> dict[str, str]:
    rule, _, wildcards = job.name.partition(":")
    if job.where:
        age, detail = clock(job.used), _progress(job.id)
    else:
        submitted, expected = _time(job.submitted), _time(start)
        age = clock((datetime.now() - submitted).total_seconds()) if submitted else "-"
        detail = reason_in_words(job.reason)
        if expected and starts_by_itself(job.reason):
            detail += f"; Slurm expects to start it at {expected:%Y-%m-%d %H:%M}"
    if where and Path(where) != folder.resolve():
        detail = f"in {where}: {detail}" if detail else f"in {where}"
    state = STATES.get(job.state, job.state.lower())
    row = {"job": f"{rule} {wildcards}".strip(), "state": state, "age": age, "where": job.where or "-", "id": job.id}
    return {name: printable(text) for name, text in (row | {"detail": detail}).items()}


def _time(text: str) -> datetime | None:
    """Read a time of Slurm, which is this machine's, without a zone; None for N/A."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _progress(job: str) -> str:
    """Return the newest line of progress in the log of a job; "" if there is none yet, or the job has ended."""
    try:
        shown = ask("scontrol", "show", "job", job)
    except SlurmError as error:
        if error.outage:
            raise
        return ""
    log = re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE)
    return newest_progress(last_lines(Path(log[1]))) if log else ""
