"""Explains why a Job's pod does not run yet, from the messages of the scheduler, the kubelet and the controllers."""

import re
from dataclasses import dataclass, replace

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.group_kinds import kind_of
from vlmflow.remote.cluster.pod_group import nodes_of
from vlmflow.remote.kubernetes.cluster_state import ClusterState, amount, quantity, requests
from vlmflow.remote.kubernetes.events import message_of, time_of
from vlmflow.remote.kubernetes.group_outcome import by_node
from vlmflow.remote.kubernetes.outcome import newest

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
    found = _pod(pods[late[0]], state) if late else _no_pod(job, state)
    which = f"pod {late[0]} of 0 to {nodes - 1}" if late else f"{len(pods)} of its {nodes} pods exist"
    return replace(found, why=f"{which}: {found.why}")


def _pod(pod: Object, state: ClusterState) -> Waiting:
    refused = _container(pod, state)
    if refused:
        return refused
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Waiting(_unscheduled(pod, condition.get("message", ""), state))
    if not pod.get("spec", {}).get("nodeName"):
        return Waiting("the scheduler has not looked at it yet")
    return Waiting(_starting(pod, state))


def _no_pod(job: Object, state: ClusterState) -> Waiting:
    kind = kind_of(job)
    places = kind.refused_at(job["metadata"]["name"])
    refusals = [state.latest(place, name, {reason}) for place, name, reason in places]
    said = message_of(max(filter(None, refusals), key=time_of, default=None))
    if not said:
        return Waiting("its pod is not created yet" + (f" by {kind.operator}" if kind.operator else ""))
    message = said.partition(": ")[2] if said.startswith("Error creating") else said
    quota = re.search(r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)", message)
    if quota:
        asked, limits = _amounts(quota[2]), _amounts(quota[4])
        beyond = [name for name in asked if asked[name] > limits.get(name, float("inf"))]
        if beyond:
            return Waiting(f"quota {quota[1]} can never allow it: requested {quota[2]}, limit {quota[4]}", 0.0)
        return Waiting(
            f"quota {quota[1]} is exhausted: requested {quota[2]}, used {quota[3]}, limit {quota[4]}; the Job starts "
            "when others end"
        )
    if "violates PodSecurity" in message:
        return Waiting(f"its pod is refused: {message}", 0.0)
    return _refused(f"its pod is refused: {message}", message)


def _refused(why: str, message: str, trying: bool = False) -> Waiting:
    """Decide by the message how long to wait after a refusal."""
    if REFUSED.search(message):
        return Waiting(why, REFUSED_SECONDS, trying=trying)
    return Waiting(why, PASSING_SECONDS, again=True, trying=trying)


def _amounts(words: str) -> dict[str, float]:
    """Parse the amounts of a quota's message: `pods=1,requests.memory=4Gi`."""
    return {name: quantity(text) for name, _, text in (each.partition("=") for each in words.split(","))}


def _container(pod: Object, state: ClusterState) -> Waiting | None:
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in IMAGE:
            detail = waiting.get("message") or reason
            why = f"image {container['image']} cannot be pulled: {detail}"
            if reason in AT_ONCE:
                return Waiting(why, 0.0)
            name = pod["metadata"]["name"]
            pulling, failed = (state.latest("Pod", name, {said}) for said in ("Pulling", "Failed"))
            # Between tries the pod's status does not show why a pull failed; the kubelet's newest event does.
            return _refused(why, f"{detail} {message_of(failed)}", trying=time_of(pulling) > time_of(failed))
        if reason in CONTAINER:
            detail = waiting.get("message") or reason
            return _refused(f"container {container['name']} cannot start: {detail}", detail)
    return None


def _unscheduled(pod: Object, message: str, state: ClusterState) -> str:
    said = message.partition(". ")[0].rstrip(".")  # what follows is about preemption
    if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"].get("volumes") or []
            if "persistentVolumeClaim" in volume
        ]
        unbound = [
            f"claim {claim} is not bound ({words})"
            for claim in claims
            if (words := message_of(state.latest("PersistentVolumeClaim", claim, CLAIM)))
        ]
        return "; ".join(unbound) or f"one of its claims is missing or not bound ({', '.join(claims)}): {said}"
    short = [_shortage(name, pod, state) for name in re.findall(r"Insufficient (\S+?)[,.;]?(?=\s|$)", message)]
    return "; ".join([*dict.fromkeys(short), f"the scheduler says: {said}"] if short else [f"no node fits: {said}"])


def _shortage(resource: str, pod: Object, state: ClusterState) -> str:
    asked = requests(pod, resource)
    text = f"{resource}: {amount(resource, asked)} asked"
    room = state.room(resource)
    if room is None:
        return f"{text}, more than is free on any node that it may use"
    largest = room.largest
    if largest < asked:
        return f"{text}, the largest node has {amount(resource, largest)}: {amount(resource, asked - largest)} short"
    if room.free >= asked:  # counting only this namespace's pods; others use the rest
        return f"{text}; the nodes are large enough, but other pods use them"
    free = max(room.free, 0.0)
    return f"{text}, at most {amount(resource, free)} free on a node: {amount(resource, asked - free)} short"


def _starting(pod: Object, state: ClusterState) -> str:
    node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
    trouble = message_of(state.latest("Pod", name, MOUNT))
    if trouble:
        return f"node {node} cannot set up the pod: {trouble}"
    pulling = message_of(state.latest("Pod", name, {"Pulling", "Pulled", "Created", "Started"}))
    if pulling.startswith("Pulling"):
        return f"node {node}: {pulling[0].lower()}{pulling[1:]}"
    return f"node {node} is starting the pod"
