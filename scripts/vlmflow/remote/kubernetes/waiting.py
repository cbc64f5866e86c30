"""Explains why a Job's pod does not run yet, from the messages of the scheduler, the kubelet and the controllers."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Self

from kubernetes.utils.quantity import parse_quantity

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.groups import kind_of, nodes_of
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.outcome import by_node, by_object, message_of, newest, newest_of, time_of

REFUSED_SECONDS = 120.0
"""How long an image or pod may be refused with a permanent-looking message: a registry may fail for some minutes."""

PASSING_SECONDS = 1800.0
"""How long any other refusal may last: a registry or an admission webhook that does not answer."""

REFUSED = re.compile(
    r"not found|does not exist|denied|unauthorized|forbidden|manifest unknown|no match for platform|"
    r"invalid reference format|violates PodSecurity",
    re.IGNORECASE,
)
"""Words of registries, kubelets and admission for what does not exist or is not allowed."""

AT_ONCE = {"InvalidImageName", "ErrImageNeverPull"}
IMAGE = AT_ONCE | {"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"}
CONTAINER = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}

MOUNT = {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"}
CLAIM = {"FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning"}


class ClusterState:
    """What explains waiting at one moment: the namespace's events, the nodes' capacity and the pods' requests.

    One reading serves every waiting Job, so sums over nodes and pods are computed once for each resource.
    pods: all that are known. nodes: None without the right to list them; then only the scheduler's message is shown.
    """

    def __init__(
        self, pods: Iterable[Object] = (), events: Iterable[Object] = (), nodes: list[Object] | None = None
    ) -> None:
        self._holding = [pod for pod in pods if _holds(pod)]
        self._events = by_object(events)
        self._nodes = nodes
        self.room = cache(self._room)

    @classmethod
    def of(cls, cluster: Namespace) -> Self:
        """Read it from the cluster."""
        return cls(cluster.holding_pods(), cluster.events(), cluster.nodes())

    def latest(self, kind: str, name: str, reasons: Collection[str]) -> Object | None:
        """Return the newest event of an object with one of these reasons, or None."""
        return newest_of(self._events.get((kind, name), []), reasons)

    def _room(self, resource: str) -> tuple[float, float] | None:
        """Return how much of a resource the largest node has, and the most that is free on one node.

        None without the right to list nodes.
        """
        if self._nodes is None:
            return None
        has = {
            node["metadata"]["name"]: quantity((node["status"].get("allocatable") or {}).get(resource))
            for node in self._nodes
        }
        free = dict(has)
        for pod in self._holding:
            node = pod["spec"]["nodeName"]
            if node in free:
                free[node] -= requests(pod, resource)
        return max(has.values(), default=0.0), max(free.values(), default=0.0)


def _holds(pod: Object) -> bool:
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod.get("spec", {}).get("nodeName")) and not over


def requests(pod: Object, resource: str) -> float:
    """Return how much of a resource a pod's containers request together."""
    resources = [container.get("resources") or {} for container in pod.get("spec", {}).get("containers") or []]
    return sum(quantity((amounts.get("requests") or {}).get(resource)) for amounts in resources)


@lru_cache(maxsize=4096)
def quantity(text: Any) -> float:
    """Parse an amount as the API writes it (500m, 2Gi); None or "" gives 0."""
    return float(parse_quantity(text)) if text else 0.0


@dataclass(frozen=True)
class Waiting:
    """why: for people. hopeless_after: seconds of this reason after which the Job fails; None for never.

    again: whether another attempt may help then. trying: the kubelet is trying now, so the Job does not fail yet.
    """

    why: str
    hopeless_after: float | None = None
    again: bool = False
    trying: bool = False

    @property
    def reason(self) -> str:
        """The part of `why` that stays the same while amounts and the kubelet's wording change."""
        short = re.findall(r"(\S+): \S+(?: GB)? asked", self.why)
        return " ".join(sorted(short)) or self.why.partition(" cannot be pulled")[0]


def explain(job: Object, own: list[Object], state: ClusterState) -> Waiting:
    """Return why a Job waits; of several pods, why the first one waits that does not run. own: its pods."""
    nodes = nodes_of(job)
    if job["spec"].get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
        return Waiting(f"its Job is suspended, until queue {queue} admits it" if queue else "its Job is suspended")
    if nodes == 1:
        pod = newest(own)
        return _pod(pod, state) if pod else _no_pod(job, state)
    pods = by_node(own)
    late = [node for node, pod in pods.items() if pod.get("status", {}).get("phase") not in ("Running", "Succeeded")]
    # A pod without a node says more than one that starts.
    late.sort(key=lambda node: bool(pods[node]["spec"].get("nodeName")))
    waiting = _pod(pods[late[0]], state) if late else _no_pod(job, state)
    which = f"pod {late[0]} of 0 to {nodes - 1}" if late else f"{len(pods)} of its {nodes} pods exist"
    return replace(waiting, why=f"{which}: {waiting.why}")


def _no_pod(job: Object, state: ClusterState) -> Waiting:
    kind = kind_of(job)
    refusals = [
        state.latest(of_kind, name, {reason}) for of_kind, name, reason in kind.refused_at(job["metadata"]["name"])
    ]
    message = message_of(max(filter(None, refusals), key=time_of, default=None))
    if not message:
        return Waiting("its pod is not created yet" + (f" by {kind.operator}" if kind.operator else ""))
    if message.startswith("Error creating"):
        message = message.partition(": ")[2]
    if quota := re.search(r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)", message):
        name, requested, used, limited = quota.groups()
        limits = _amounts(limited)
        if any(amount > limits.get(resource, float("inf")) for resource, amount in _amounts(requested).items()):
            return Waiting(f"quota {name} can never allow it: requested {requested}, limit {limited}", 0.0)
        amounts = f"requested {requested}, used {used}, limit {limited}"
        return Waiting(f"quota {name} is exhausted: {amounts}; the Job starts when others end")
    if "violates PodSecurity" in message:
        return Waiting(f"its pod is refused: {message}", 0.0)
    return _refused(f"its pod is refused: {message}", message)


def _amounts(words: str) -> dict[str, float]:
    """Parse the amounts of a quota's message: `pods=1,requests.memory=4Gi`."""
    return {name: quantity(text) for name, _, text in (word.partition("=") for word in words.split(","))}


def _refused(why: str, message: str, trying: bool = False) -> Waiting:
    """Decide by the message how long to wait after a refusal."""
    if REFUSED.search(message):
        return Waiting(why, REFUSED_SECONDS, trying=trying)
    return Waiting(why, PASSING_SECONDS, again=True, trying=trying)


def _pod(pod: Object, state: ClusterState) -> Waiting:
    if refused := _container(pod, state):
        return refused
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Waiting(_unscheduled(pod, condition.get("message", ""), state))
    if not pod.get("spec", {}).get("nodeName"):
        return Waiting("the scheduler has not looked at it yet")
    return Waiting(_starting(pod, state))


def _container(pod: Object, state: ClusterState) -> Waiting | None:
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        detail = waiting.get("message") or reason
        if reason in IMAGE:
            why = f"image {container['image']} cannot be pulled: {detail}"
            if reason in AT_ONCE:
                return Waiting(why, 0.0)
            name = pod["metadata"]["name"]
            pulling, failed = (state.latest("Pod", name, {event}) for event in ("Pulling", "Failed"))
            # Between tries the pod's status does not show why a pull failed; the kubelet's newest event does.
            return _refused(why, f"{detail} {message_of(failed)}", trying=time_of(pulling) > time_of(failed))
        if reason in CONTAINER:
            return _refused(f"container {container['name']} cannot start: {detail}", detail)
    return None


def _unscheduled(pod: Object, message: str, state: ClusterState) -> str:
    reason = message.partition(". ")[0].rstrip(".")  # what follows is about preemption
    if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
        volumes = (volume.get("persistentVolumeClaim") for volume in pod["spec"].get("volumes") or [])
        claims = [claim["claimName"] for claim in volumes if claim]
        unbound = [
            f"claim {claim} is not bound ({words})"
            for claim in claims
            if (words := message_of(state.latest("PersistentVolumeClaim", claim, CLAIM)))
        ]
        return "; ".join(unbound) or f"one of its claims is missing or not bound ({', '.join(claims)}): {reason}"
    short = [_shortage(name, pod, state) for name in re.findall(r"Insufficient (\S+?)[,.;]?(?=\s|$)", message)]
    return "; ".join([*dict.fromkeys(short), f"the scheduler says: {reason}"] if short else [f"no node fits: {reason}"])


def _shortage(resource: str, pod: Object, state: ClusterState) -> str:
    def words(number: float) -> str:
        """Memory and disk in GB (10⁹ bytes), others as a number."""
        return f"{number / 1e9:,.1f} GB" if resource in ("memory", "ephemeral-storage") else f"{number:g}"

    needed = requests(pod, resource)
    text, room = f"{resource}: {words(needed)} asked", state.room(resource)
    if room is None:
        return f"{text}, more than is free on any node that it may use"
    largest, free = room
    if largest < needed:
        return f"{text}, the largest node has {words(largest)}: {words(needed - largest)} short"
    if free >= needed:  # counting only this namespace's pods; others use the rest
        return f"{text}; the nodes are large enough, but other pods use them"
    free = max(free, 0.0)
    return f"{text}, at most {words(free)} free on a node: {words(needed - free)} short"


def _starting(pod: Object, state: ClusterState) -> str:
    node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
    if trouble := message_of(state.latest("Pod", name, MOUNT)):
        return f"node {node} cannot set up the pod: {trouble}"
    pulling = message_of(state.latest("Pod", name, {"Pulling", "Pulled", "Created", "Started"}))
    if pulling.startswith("Pulling"):
        return f"node {node}: {pulling[0].lower()}{pulling[1:]}"
    return f"node {node} is starting the pod"
