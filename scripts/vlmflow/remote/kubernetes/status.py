"""The lines of `make status` for a namespace of Kubernetes, one for each Job."""

import sys
from datetime import datetime

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import clock
from vlmflow.remote.cluster.api import Object, Refused, connect
from vlmflow.remote.cluster.copying import selector
from vlmflow.remote.cluster.group_kinds import IndexedJob
from vlmflow.remote.cluster.pods import job_of, nodes_of
from vlmflow.remote.findings import in_columns
from vlmflow.remote.job import LINES, newest_progress
from vlmflow.remote.kubernetes.disruptions import words_of
from vlmflow.remote.kubernetes.job_shape import RULE
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.outcome import by_node, judge_pods, read_time
from vlmflow.remote.kubernetes.waiting import ClusterState, explain

PATIENCE = 10.0
"""Seconds to retry the API: a person waits for this answer."""


def lines(namespace: str, groups: IndexedJob, optional: bool) -> list[str]:
    """Return the lines for the namespace's Jobs, or one that says why there are none.

    groups: how several pods train together. optional: whether a machine without a configured cluster has nothing to
    say. A refusal of the API server ends the process.
    """
    try:
        client = connect(lambda text: print(text, file=sys.stderr), PATIENCE)
    except VlmflowError as error:
        return [] if optional else [error.cause]
    try:
        shown = table(Namespace(namespace, client, groups))
    except VlmflowError as error:
        return [error.cause]
    except Refused as error:
        if not error.status:
            return [f"no cluster answers: {error}"]
        sys.exit(f"namespace {namespace}: {error}\n  what to do: `make doctor` shows what the cluster lacks")
    return shown or [f"namespace {namespace} has no Job of vlmflow"]


def table(cluster: Namespace) -> list[str]:
    """Return the lines, in columns, the oldest Job first; [] if there is none."""
    jobs = sorted(cluster.jobs(f"{selector()},{RULE}"), key=lambda job: job["metadata"]["creationTimestamp"])
    if not jobs:
        return []
    pods: dict[str, list[Object]] = {}
    for pod in cluster.pods(f"{selector()},{RULE}"):
        pods.setdefault(job_of(pod), []).append(pod)
    state = ClusterState(cluster.holding_pods(), cluster.events(), cluster.nodes())
    rows = [_row(cluster, job, pods.get(job["metadata"]["name"], []), state, cluster.now()) for job in jobs]
    return in_columns(rows)


def _row(cluster: Namespace, job: Object, own: list[Object], state: ClusterState, now: datetime) -> list[str]:
    outcome, pods = judge_pods(job, own, {}, now), by_node(own)
    detail = outcome.ended.cause
    if outcome.state == "waiting":
        detail = explain(job, own, state).why
    elif outcome.state == "running":
        detail = newest_progress(cluster.log_end(pods[0]["metadata"]["name"], LINES, nodes_of(job)))
    since = clock((now - read_time(job["metadata"]["creationTimestamp"])).total_seconds())
    where = ",".join(pod.get("spec", {}).get("nodeName", "-") for pod in pods.values()) or "-"
    return [words_of(job), outcome.state, since, where, detail]
