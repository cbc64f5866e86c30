"""Judges how a Job goes and ends, from the Job, its pods and their events as the API shows them.

Of a Job of several pods the success is that of node 0, and the failure of any pod ends all.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.groups import node_of, nodes_of, rule_container
from vlmflow.remote.job import NO_MEMORY, Ended, verdict_of
from vlmflow.remote.library import NOT_AGAIN

LOST_SECONDS = 30.0
"""How long after its grace period a pod that remains counts as lost with its node."""

OOM = "OOMKilled"

TAKEN = Ended("lost", "its pod was removed: evicted, or deleted by hand")

NOT_YET = Ended()

VERDICT_BYTES = 4096
"""The kubelet's own limit of a termination message; a longer text is not from a stage."""

DISRUPTIONS = {
    "PreemptionByScheduler": Ended("preempted", "preempted by a pod of higher priority"),
    "EvictionByEvictionAPI": Ended("preempted", "evicted (a drained node, or by hand)"),
    "DeletionByTaintManager": Ended("lost", "removed from its node, which does not answer or has a new taint"),
    "DeletionByPodGC": Ended("lost", "deleted, because its node no longer exists"),
    "TerminationByKubelet": Ended("lost", "ended by its node, which lacks a resource or shuts down"),
}
"""Reasons of the pod condition DisruptionTarget:
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"""

EVENTS = {"Preempted": "PreemptionByScheduler", "TaintManagerEviction": "DeletionByTaintManager"}
"""The scheduler's and the taint manager's event reasons for the same. A pod that a kubelet ends needs no event: it
stays until it is deleted, with the reason in its status."""

FAILED = ("Failed", "FailureTarget")
"""Conditions of a Job that has failed; with the second alone, its pods still end."""


@dataclass(frozen=True)
class Outcome:
    """state: "ending" means that it failed or is deleted, and its pod still saves its work.

    pod: the newest pod's name, if any. ended: how it failed or ends. ran: seconds that its newest pod was seen running.
    unseen: the pod disappeared between two looks, and its conditions with it; events may still give the reason
    (taken_by). others: the names of a group's other pods. incomplete: a group whose pods did not all get to run.
    runs_on: a group that has failed, but that its operator does not end.
    """

    state: Literal["waiting", "running", "ending", "succeeded", "failed"]
    pod: str | None = None
    ended: Ended = NOT_YET
    ran: float = 0.0
    unseen: bool = False
    others: tuple[str, ...] = ()
    incomplete: bool = False
    runs_on: bool = False


def not_created(error: Exception) -> Outcome:
    """Return the outcome of a Job that could not be created."""
    away = isinstance(error, Refused) and (error.status or 500) >= 500
    return Outcome("failed", ended=Ended("refused", f"its Job could not be created: {error}", again=away))


def judge_pods(job: Object | None, pods: list[Object], last_seen: Mapping[int, Object], now: datetime) -> Outcome:
    """Judge one Job, of one pod or of several.

    job: None if it no longer exists. pods: its existing pods. last_seen: its newest pods as last seen, by number.
    now: the API server's time.
    """
    if nodes_of(job) == 1 and not any(node_of(pod) for pod in [*pods, *last_seen.values()]):
        return judge(job, pods, last_seen.get(0), now)
    outcome = _judge_group(job, pods, last_seen, now)
    names = sorted({_name(pod) for pod in [*pods, *last_seen.values()]} - {outcome.pod})
    return replace(outcome, others=tuple(names))


def judge(job: Object | None, pods: list[Object], last_seen: Object | None, now: datetime) -> Outcome:
    """Judge one Job of one pod.

    job: None if it no longer exists. pods: the Job's existing pods. last_seen: its newest pod as last seen. now: the
    API server's time. A Job has failed only when none of its pods runs, so that a new attempt never meets the old one.
    A Job that a queue suspended has not failed: the Job controller removed its pod, and creates another when the queue
    admits it.
    """
    pod = newest(pods) or last_seen
    name = _name(pod) if pod else None
    if is_true(job, "Complete") or (pod and succeeded(pod)):
        return Outcome("succeeded", name)
    alive = [pod for pod in pods if not is_over(pod, now)]
    over = job is None or is_true(job, *FAILED)
    suspended = job is not None and not over and was_suspended(job, pod)
    if not alive and suspended:
        return Outcome("waiting")
    if not alive and (over or pod is not None):
        if job is not None and pod is not None and not pods and not is_over(pod, now):
            return _gone(pod)
        return _failure(job, pod, now)
    if alive and alive[0]["metadata"].get("deletionTimestamp"):
        taken = how_taken(alive[0]) or Ended(cause="its Job is suspended" if suspended else "deleted")
        # It is taken away when it has ended: until then its Job stays, and its place in a queue.
        return Outcome("ending", name, Ended(cause=taken.cause))
    return Outcome("running" if pod and _phase(pod) == "Running" else "waiting", name)


def _gone(pod: Object) -> Outcome:
    """Return the outcome of a Job whose pod no longer exists, and was not seen to end. pod: as last seen."""
    taken = how_taken(pod)
    return Outcome("failed", _name(pod), taken or TAKEN, unseen=taken is None)


def _failure(job: Object | None, pod: Object | None, now: datetime) -> Outcome:
    """Return the outcome of a failed Job, with the reason. pod: its newest, or None."""
    return Outcome("failed", _name(pod) if pod else None, _how_failed(job, pod, now))


def _how_failed(job: Object | None, pod: Object | None, now: datetime) -> Ended:
    if pod is None:
        return Ended("lost", "its Job was deleted before a pod began") if job is None else Ended(cause=_words_of(job))
    status = pod.get("status", {})
    ended = terminated(pod) or {}
    message = status.get("message") or ""
    if ended.get("reason") == OOM:
        return Ended("out of memory", "killed: it needed more memory than its limit")
    if status.get("reason") == "Evicted":
        # These words mean a limit of the pod itself; a node that is low on disk evicts with other words.
        own = "exceed" in message and "limit" in message
        hint = "; give the rule a larger disk_mb" if own else ""
        if own and "EmptyDir" in message:
            hint = "; raise the sizeLimit of that volume in the pod template (k8s/templates)"
        return Ended("failed" if own else "preempted", f"evicted: {message.strip()}{hint}", again=not own)
    if status.get("reason") == "DeadlineExceeded":
        return Ended("out of time", "stopped: it exceeded its runtime (the rule's resource runtime, in minutes)")
    if taken := how_taken(pod):
        return taken
    # A deleted pod fails as it ends: the result must not depend on whether a look still finds it.
    if "deletionTimestamp" in pod["metadata"] and (ended or job is None):
        return TAKEN if job else Ended("lost", "its Job was deleted")
    if ended:
        verdict = verdict_of(ended.get("message") or "", VERDICT_BYTES)
        if verdict.get(NO_MEMORY) is True:
            return Ended("out of memory", "a process was killed: it needed more memory than its limit")
        signalled = f" (signal {ended['exitCode'] - 128})" if ended.get("exitCode", 0) > 128 else ""
        again = verdict != NOT_AGAIN
        return Ended("failed", f"ended with exit code {ended.get('exitCode')}{signalled}", again)
    if is_lost(pod, now):
        node = pod.get("spec", {}).get("nodeName")
        return Ended("lost", f"lost: node {node} does not answer, and the pod's grace period is over")
    if job is None:
        return Ended("lost", "its Job was deleted")
    # A pod that its node refuses (its GPUs fail, it has just become full) fails before a container starts.
    refused = status.get("phase") == "Failed" and "reason" in status
    why = f"{status.get('reason') or _words_of(job)} {message}".strip()
    return Ended("lost" if refused else "failed", why)


def _words_of(job: Object) -> str:
    failed = condition(job, *FAILED)
    words = f"{failed.get('reason', 'failed')}: {failed.get('message', '')}".strip(": ")
    return words if failed else "its pod no longer exists"


def how_taken(pod: Object) -> Ended | None:
    """Return how the cluster removed a pod, from its conditions; None if they do not say it."""
    taken = condition(pod, "DisruptionTarget")
    reason = taken.get("reason", "")
    return _because(DISRUPTIONS.get(reason, Ended("lost", reason)), taken.get("message", "")) if taken else None


def taken_by(pod: str, events: list[Object]) -> Ended | None:
    """Return from the namespace's events how a pod was removed; None if they do not show it."""
    # The taint manager uses one reason for deletions and for cancelled ones.
    carried_out = [event for event in events if not (event.get("message") or "").startswith("Cancelling deletion")]
    event = newest_of(by_object(carried_out).get(("Pod", pod), []), EVENTS)
    return _because(DISRUPTIONS[EVENTS[event["reason"]]], message_of(event)) if event else None


def _because(ended: Ended, message: str) -> Ended:
    return replace(ended, cause=f"{ended.cause}: {message}".strip(": "))


def _judge_group(job: Object | None, pods: list[Object], last_seen: Mapping[int, Object], now: datetime) -> Outcome:
    existing = by_node(pods)
    over = job is None or is_true(job, *FAILED)
    gone = {
        node: pod
        for node, pod in last_seen.items()
        if node not in existing and not has_ended(pod) and (job is None or over or not was_suspended(job, pod))
    }
    first = {**last_seen, **existing}.get(0)
    name = _name(first) if first else None
    if is_true(job, "Complete") or (first and succeeded(first)):
        return Outcome("succeeded", name)
    alive = [pod for pod in pods if not is_over(pod, now)]
    if job is not None and not over and was_suspended(job, newest(list(existing.values()))):
        return Outcome("ending", name, Ended(cause="its Job is suspended")) if alive else Outcome("waiting")
    again = _made_again(job, existing, last_seen)
    broken = again or {node: pod for node, pod in existing.items() if _has_failed(pod)} | gone
    if over or broken:
        outcome = _first_to_end(job, pods, broken, {*gone, *again}, now)
        return replace(outcome, state="ending", runs_on=bool(again)) if alive else outcome
    runs = [_phase(pod) == "Running" or succeeded(pod) for pod in existing.values()]
    return Outcome("running" if len(runs) == nodes_of(job) and all(runs) else "waiting", name)


def by_node(pods: list[Object]) -> dict[int, Object]:
    """Return the newest pod of each number."""
    pods_of: dict[int, list[Object]] = {}
    for pod in pods:
        pods_of.setdefault(node_of(pod), []).append(pod)
    return {node: newest(pods_of[node]) or {} for node in sorted(pods_of)}


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


def _has_failed(pod: Object) -> bool:
    """Return whether a pod failed, or must end; one that has done its part has not failed."""
    return not succeeded(pod) and (has_ended(pod) or "deletionTimestamp" in pod["metadata"])


def _first_to_end(
    job: Object | None, pods: list[Object], broken: Mapping[int, Object], gone: set[int], now: datetime
) -> Outcome:
    """Return the outcome of the pod that ended first, as far as clocks agree: the Job controller deletes the others."""
    if not broken:
        return _failure(job, newest(pods), now)

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
    outcome = _gone(pod) if first in gone else _failure(job, pod, now)
    return replace(outcome, ended=replace(outcome.ended, cause=which + outcome.ended.cause))


def _ended_by_its_job(job: Object | None, pod: Object) -> bool:
    """Return whether a pod was deleted only when its Job had already failed."""
    begun, over = (condition(job, name).get("lastTransitionTime") for name in ("FailureTarget", "Failed"))
    since = begun or over
    at, was_deleted = _end_of(pod)
    return was_deleted and since is not None and at >= read_time(since)


def _end_of(pod: Object) -> tuple[datetime, bool]:
    """Return when a pod ended or began to be deleted, and whether it was deleted; within a second, that comes later."""
    metadata, ended = pod["metadata"], terminated(pod) or {}
    if "deletionTimestamp" in metadata:
        grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
        return read_time(metadata["deletionTimestamp"]) - grace, True
    at = ended.get("finishedAt") or metadata.get("creationTimestamp") or "1970-01-01T00:00:00Z"
    return read_time(at), False


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _phase(pod: Object) -> str | None:
    phase: str | None = pod.get("status", {}).get("phase")
    return phase


def newest(pods: list[Object]) -> Object | None:
    """Return the pod that was created last, or None."""
    return max(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", default=None)


def terminated(pod: Object) -> Object | None:
    """Return the terminated state of the rule's container, or None if it has not ended."""
    name = rule_container(pod)
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container["name"] == name:
            ended: Object | None = container.get("state", {}).get("terminated")
            return ended
    return None


def succeeded(pod: Object) -> bool:
    """Return whether the pod's rule has ended well."""
    ended = terminated(pod)
    return _phase(pod) == "Succeeded" or (ended is not None and ended.get("exitCode") == 0)


def has_ended(pod: Object) -> bool:
    """Return whether the pod's rule has certainly ended."""
    return _phase(pod) in ("Succeeded", "Failed") or terminated(pod) is not None


def is_lost(pod: Object, now: datetime) -> bool:
    """Return whether the pod should have ended long ago (deletionTimestamp is when its grace period ends)."""
    ends = pod["metadata"].get("deletionTimestamp")
    return ends is not None and (now - read_time(ends)).total_seconds() > LOST_SECONDS


def is_over(pod: Object, now: datetime) -> bool:
    """Return whether the pod's rule has ended, as far as is known."""
    return has_ended(pod) or is_lost(pod, now)


def was_suspended(job: Object, pod: Object | None) -> bool:
    """Return whether a Job is suspended, or was since its newest pod was created: the suspension removed that pod."""
    if job.get("spec", {}).get("suspend"):
        return True
    made = pod["metadata"].get("creationTimestamp") if pod else None
    return made is not None and any(
        condition["type"] == "Suspended" and (condition.get("lastTransitionTime") or "") > made
        for condition in job.get("status", {}).get("conditions") or []
    )


def condition(job_or_pod: Object | None, *types: str) -> Object:
    """Return the first condition of a Job or pod that is true and of one of these types; {} if there is none."""
    conditions: list[Object] = (job_or_pod or {}).get("status", {}).get("conditions") or []
    return next((held for held in conditions if held["type"] in types and held["status"] == "True"), {})


def is_true(job_or_pod: Object | None, *types: str) -> bool:
    """Return whether a condition of one of these types is true."""
    return bool(condition(job_or_pod, *types))


def read_time(text: str) -> datetime:
    """Parse a time as the API writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def by_object(events: Iterable[Object]) -> dict[tuple[str | None, str | None], list[Object]]:
    """Group events by the kind and name of their object. Components report them; they are kept for an hour."""
    events_of: dict[tuple[str | None, str | None], list[Object]] = {}
    for event in events:
        about = event["involvedObject"]
        events_of.setdefault((about.get("kind"), about.get("name")), []).append(event)
    return events_of


def newest_of(events: Iterable[Object], reasons: Collection[str]) -> Object | None:
    """Return the event that was last seen with one of these reasons (`Failed`, `Pulling`); None without one."""
    return max((event for event in events if event.get("reason") in reasons), key=time_of, default=None)


def time_of(event: Object | None) -> str:
    """Return when an event was last seen, as the API writes times; "" for None."""
    return (event or {}).get("lastTimestamp") or (event or {}).get("eventTime") or ""


def message_of(event: Object | None) -> str:
    """Return what an event says for people, without white space around it; "" for None."""
    return ((event or {}).get("message") or "").strip()
