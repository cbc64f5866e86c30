"""Shows what runs now: `make status`.

One line for each training of this machine: run and stage, what it does, its age, its process, its progress. One line
for each Job in the namespace: what it runs, its state, its age, its nodes, and its progress or why it waits.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from remote.cluster.api import Object
from remote.cluster.client import Refused, connect
from remote.cluster.group_kinds import KINDS, IndexedJob
from remote.cluster.instance import selector
from remote.cluster.pod_group import job_of, nodes_of
from remote.kubernetes.clean_end import words_of
from remote.kubernetes.group_outcome import by_node, judge_pods
from remote.kubernetes.job_shape import RULE
from remote.kubernetes.namespace import Namespace
from remote.kubernetes.outcome import read_time
from remote.kubernetes.stage_log import LINES, newest_progress
from remote.kubernetes.surroundings import Surroundings
from remote.kubernetes.waiting import explain
from remote.training import Training
from vlmflow.config.model import check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import clock

PATIENCE = 10.0
"""Seconds to retry the API: a person waits for this answer."""


CONFIG = Path(__file__).resolve().parents[3] / "config.yaml"


def main(local_runs: Callable[[Path], Sequence[Training]]) -> None:
    """Print the trainings of this machine, and the table for the namespace of the command line.

    local_runs: returns the trainings of this machine. It takes the folder of all run folders (stores.runs).
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespace")
    parser.add_argument(
        "--configfile", nargs="+", type=Path, default=[], help="as for snakemake, if stores.runs is set there"
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="the working directory, as for snakemake")
    given = parser.parse_args()
    try:
        settings = check_config(read_layers([CONFIG, *given.configfile]), [CONFIG, *given.configfile])
    except VlmflowError as error:
        sys.exit(str(error))
    store = given.directory / settings.stores.runs
    lines = _of_this_machine(local_runs(store)) or [f"this machine trains nothing in {store.absolute()}"]
    print("\n".join(lines), flush=True)
    print(_of_cluster(given.namespace, KINDS[settings.cluster.multi_node]))


def _of_this_machine(trainings: Sequence[Training]) -> list[str]:
    """Return a line for each training, in columns."""
    return _in_columns(
        [
            [f"{one.run} {one.stage}", one.doing, clock(time.time() - one.since), one.holder, one.progress]
            for one in trainings
        ]
    )


def _of_cluster(namespace: str, groups: IndexedJob) -> str:
    """Return the table of the namespace's Jobs, or why there is none; a machine without a cluster is no error."""
    try:
        lines = table(Namespace(namespace, connect(lambda text: print(text, file=sys.stderr), PATIENCE), groups))
    except VlmflowError as error:
        return error.cause
    except Refused as error:
        if not error.status:
            return f"no cluster answers: {error}"
        sys.exit(f"namespace {namespace}: {error}\n  what to do: `make doctor` shows what the cluster lacks")
    return "\n".join(lines) or f"namespace {namespace} has no Job of vlmflow"


def table(cluster: Namespace) -> list[str]:
    """Return the lines, in columns, the oldest Job first; [] if there is none."""
    jobs = sorted(cluster.jobs(f"{selector()},{RULE}"), key=lambda job: job["metadata"]["creationTimestamp"])
    if not jobs:
        return []
    pods: dict[str, list[Object]] = {}
    for pod in cluster.pods(f"{selector()},{RULE}"):
        pods.setdefault(job_of(pod), []).append(pod)
    around = Surroundings(cluster.holding_pods(), cluster.events(), cluster.nodes())
    rows = [_row(cluster, job, pods.get(job["metadata"]["name"], []), around, cluster.now()) for job in jobs]
    return _in_columns(rows)


def _in_columns(rows: list[list[str]]) -> list[str]:
    """Return a line for each row; the last cells keep their widths."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _row(cluster: Namespace, job: Object, own: list[Object], around: Surroundings, now: datetime) -> list[str]:
    outcome, pods = judge_pods(job, own, {}, now), by_node(own)
    detail = outcome.ended.cause
    if outcome.state == "waiting":
        detail = explain(job, own, around).why
    elif outcome.state == "running":
        detail = newest_progress(cluster.log_end(pods[0]["metadata"]["name"], LINES, nodes_of(job)))
    since = clock((now - read_time(job["metadata"]["creationTimestamp"])).total_seconds())
    where = ",".join(pod.get("spec", {}).get("nodeName", "-") for pod in pods.values()) or "-"
    return [words_of(job), outcome.state, since, where, detail]
