"""Judges the outcome of a Job of several pods: success is that of node 0, and the failure of any pod ends all."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.pod_group import node_of, nodes_of
from vlmflow.remote.ended import Ended
from vlmflow.remote.kubernetes.outcome import (
    FAILED,
    TAKEN,
    Outcome,
    condition_time,
    failure,
    has_ended,
    how_taken,
    is_over,
    is_true,
    judge,
    newest,
    read_time,
    succeeded,
    terminated,
    was_suspended,
)


def judge_pods(job: Object | None, pods: list[Object], last_seen: Mapping[int, Object], now: datetime) -> Outcome:
    """Judge one Job, of one pod or of several.

    job: None if it no longer exists. pods: its existing pods. last_seen: its newest pods as last seen, by number.
    now: the API server's time.
    """
    several = nodes_of(job) > 1 or any(node_of(pod) for pod in [*pods, *last_seen.values()])
    if not several:
        return judge(job, pods, last_seen.get(0), now)
    outcome = _judge_group(job, pods, last_seen, now)
    names = sorted(pod["metadata"]["name"] for pod in [*pods, *last_seen.values()])
    return replace(outcome, others=tuple(name for name in dict.fromkeys(names) if name != outcome.pod))


def by_node(pods: list[Object]) -> dict[int, Object]:
    """Return the newest pod of each number."""
    found: dict[int, list[Object]] = {}
    for pod in pods:
        found.setdefault(node_of(pod), []).append(pod)
    return {node: newest(found[node]) or {} for node in sorted(found)}


def newest_seen(job: Object | None, pods: list[Object], last_seen: Mapping[int, Object]) -> dict[int, Object]:
    """Return the newest pods seen, by number; one that was made again stays, as the next look must know it, too."""
    existing = by_node(pods)
    return {**last_seen, **existing, **_made_again(job, existing, last_seen)}


def _made_again(
    job: Object | None, existing: Mapping[int, Object], last_seen: Mapping[int, Object]
) -> dict[int, Object]:
    """Return the last seen pods of a group in whose places others are, though no queue suspended the group.

    The Training Operator makes a deleted pod again that did not run; but then the others train with one that is lost.
    """
    several = nodes_of(job) > 1 or any(last_seen)
    return {
        node: pod
        for node, pod in last_seen.items()
        if several
        and node in existing
        and pod["metadata"].get("uid") != existing[node]["metadata"].get("uid")
        and not succeeded(pod)
        and (job is None or not was_suspended(job, pod))
    }


def _judge_group(job: Object | None, pods: list[Object], last_seen: Mapping[int, Object], now: datetime) -> Outcome:
    existing = by_node(pods)
    over = job is None or is_true(job, *FAILED)
    gone = {
        node: pod
        for node, pod in last_seen.items()
        if node not in existing and not has_ended(pod) and (job is None or over or not was_suspended(job, pod))
    }
    known = {**last_seen, **existing}
    first = known.get(0)
    name = first["metadata"]["name"] if first else None
    if is_true(job, "Complete") or (first and succeeded(first)):
        return Outcome("succeeded", name)
    alive = [pod for pod in pods if not is_over(pod, now)]
    if job is not None and not over and was_suspended(job, newest(list(existing.values()))):
        return Outcome("ending", name, Ended(cause="its Job is suspended")) if alive else Outcome("waiting")
    again = _made_again(job, existing, last_seen)
    broken = again or {node: pod for node, pod in existing.items() if _has_failed(pod)} | gone
    if over or broken:
        cause = _cause(job, pods, broken, {*gone, *again}, now)
        return replace(cause, state="ending", runs_on=bool(again)) if alive else cause
    runs = len(existing) == nodes_of(job) and all(_runs(pod) for pod in existing.values())
    return Outcome("running" if runs else "waiting", name)


def _cause(
    job: Object | None, pods: list[Object], broken: Mapping[int, Object], gone: set[int], now: datetime
) -> Outcome:
    """Return the outcome of the pod that ended first, as far as clocks agree: the Job controller deletes the others."""
    if not broken:
        return failure(job, newest(pods), now)

    def order(node: int) -> tuple[object, ...]:
        """Of a pod that vanished without a sign only that is known; but what the Job controller deletes ended later."""
        pod = broken[node]
        unseen = node in gone and "deletionTimestamp" not in pod["metadata"]
        rank = 2 if _ended_by_its_job(job, pod) else 1 if unseen else 0
        return rank, *_end_of(pod), node

    first = min(broken, key=order)
    pod = broken[first]
    # Within one second, nothing tells the pod that was deleted first from those that its Job deleted for it.
    alike = [node for node in sorted(broken) if order(node)[:-1] == order(first)[:-1] and _ended_by_its_job(job, pod)]
    which = f"pod {' or '.join(map(str, alike or [first]))}: "
    if first in gone:
        taken = how_taken(pod)
        outcome = Outcome("failed", pod["metadata"]["name"], taken or TAKEN, unseen=taken is None)
    else:
        outcome = failure(job, pod, now)
    return replace(outcome, ended=replace(outcome.ended, cause=which + outcome.ended.cause))


def _ended_by_its_job(job: Object | None, pod: Object) -> bool:
    """Return whether a pod was deleted only when its Job had already failed."""
    since = condition_time(job, "FailureTarget") or condition_time(job, "Failed")
    at, was_deleted = _end_of(pod)
    return was_deleted and since is not None and at >= since


def _end_of(pod: Object) -> tuple[datetime, bool]:
    """Return when a pod ended or began to be deleted, and whether it was deleted; within a second, that comes later."""
    metadata, ended = pod["metadata"], terminated(pod) or {}
    if "deletionTimestamp" in metadata:
        grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
        return read_time(metadata["deletionTimestamp"]) - grace, True
    at = ended.get("finishedAt") or metadata.get("creationTimestamp") or "1970-01-01T00:00:00Z"
    return read_time(at), False


def _has_failed(pod: Object) -> bool:
    """Return whether a pod failed, or must end; one that has done its part has not failed."""
    return not succeeded(pod) and (has_ended(pod) or "deletionTimestamp" in pod["metadata"])


def _runs(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Running" or succeeded(pod)
