"""Why a Job's pod does not run yet, in words, from what the scheduler, the kubelet and the controllers said."""

import re
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from harness.kubernetes.events import latest, message_of
from harness.kubernetes.namespace import Object
from harness.kubernetes.outcome import newest

IMAGE_SECONDS = 120.0
"""How long an image or a pod that is refused may go on being refused: a registry has bad minutes too."""

AT_ONCE = {"InvalidImageName", "ErrImageNeverPull"}
IMAGE = AT_ONCE | {"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"}
CONTAINER = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}

MOUNT = {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"}
CLAIM = {"FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning"}


@dataclass(frozen=True)
class Waiting:
    """why: in words. hopeless_after: seconds of this reason after which it will not change; None for never."""

    why: str
    hopeless_after: float | None = None

    @property
    def reason(self) -> str:
        """What stays the same while amounts and the kubelet's turns of phrase change."""
        short = re.findall(r"(\S+): \S+(?: GB)? asked", self.why)
        return " ".join(sorted(short)) or self.why.partition(" cannot be pulled")[0]


def explain(job: Object, pods: list[Object], events: list[Object], nodes: list[Object] | None) -> Waiting:
    """Say why a Job waits.

    pods: all of the namespace that are known, the Job's own and those that use what it waits for. nodes: None where
    they may not be listed; then the scheduler's own words stand alone.
    """
    name = job["metadata"]["name"]
    own = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("job-name") == name]
    pod = newest(own)
    if job["spec"].get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
        return Waiting(f"its Job is suspended, until queue {queue} admits it" if queue else "its Job is suspended")
    if pod is None:
        return _no_pod(name, events)
    refused = _container(pod)
    if refused:
        return refused
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Waiting(_unscheduled(pod, condition.get("message", ""), pods, events, nodes))
    if not pod.get("spec", {}).get("nodeName"):
        return Waiting("the scheduler has not looked at it yet")
    return Waiting(_starting(pod, events))


def _no_pod(job: str, events: list[Object]) -> Waiting:
    said = message_of(latest(events, "Job", job, {"FailedCreate"}))
    if not said:
        return Waiting("its pod is not made yet")
    message = said.partition(": ")[2] if said.startswith("Error creating") else said
    quota = re.search(r"exceeded quota: (\S+), requested: (.*), used: (.*), limited: (.*)", message)
    if quota:
        asked, limits = _amounts(quota[2]), _amounts(quota[4])
        beyond = [name for name in asked if asked[name] > limits.get(name, float("inf"))]
        if beyond:
            return Waiting(f"quota {quota[1]} never allows it: it asks for {quota[2]} of {quota[4]} in all", 0.0)
        return Waiting(
            f"quota {quota[1]} is used up: it asks for {quota[2]}, {quota[3]} is in use of {quota[4]}; it begins "
            "when others end"
        )
    hopeless = 0.0 if "violates PodSecurity" in message else IMAGE_SECONDS
    return Waiting(f"its pod is refused: {message}", hopeless)


def _amounts(words: str) -> dict[str, float]:
    """Read what a quota says: `pods=1,requests.memory=4Gi`."""
    return {name: quantity(text) for name, _, text in (each.partition("=") for each in words.split(","))}


def _container(pod: Object) -> Waiting | None:
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in IMAGE:
            detail = waiting.get("message") or reason
            why = f"image {container['image']} cannot be pulled: {detail}"
            return Waiting(why, 0.0 if reason in AT_ONCE else IMAGE_SECONDS)
        if reason in CONTAINER:
            return Waiting(
                f"container {container['name']} cannot start: {waiting.get('message') or reason}", IMAGE_SECONDS
            )
    return None


def _unscheduled(
    pod: Object, message: str, pods: list[Object], events: list[Object], nodes: list[Object] | None
) -> str:
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
            if (words := message_of(latest(events, "PersistentVolumeClaim", claim, CLAIM)))
        ]
        return "; ".join(unbound) or f"a claim of it is not bound or not there ({', '.join(claims)}): {said}"
    short = [_shortage(name, pod, pods, nodes) for name in re.findall(r"Insufficient (\S+?)[,.;]?(?=\s|$)", message)]
    return "; ".join([*dict.fromkeys(short), f"the scheduler says: {said}"] if short else [f"no node fits: {said}"])


def _shortage(resource: str, pod: Object, pods: list[Object], nodes: list[Object] | None) -> str:
    asked = asks(pod, resource)
    text = f"{resource}: {amount(resource, asked)} asked"
    if nodes is None:
        return f"{text}, more than any node that it may use has free"
    has = {
        node["metadata"]["name"]: quantity((node["status"].get("allocatable") or {}).get(resource)) for node in nodes
    }
    largest = max(has.values(), default=0.0)
    if largest < asked:
        return f"{text}, the largest node has {amount(resource, largest)}: {amount(resource, asked - largest)} short"
    used = {name: sum(asks(other, resource) for other in pods if _holds(other, name)) for name in has}
    free = max(has[name] - used[name] for name in has)
    if free >= asked:  # by what this namespace shows; pods of others hold the rest
        return f"{text}; the nodes are large enough, but others use them"
    free = max(free, 0.0)
    return f"{text}, at most {amount(resource, free)} free on a node: {amount(resource, asked - free)} short"


def _starting(pod: Object, events: list[Object]) -> str:
    node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
    trouble = message_of(latest(events, "Pod", name, MOUNT))
    if trouble:
        return f"node {node} cannot prepare it: {trouble}"
    pulling = message_of(latest(events, "Pod", name, {"Pulling", "Pulled", "Created", "Started"}))
    if pulling.startswith("Pulling"):
        return f"node {node}: {pulling[0].lower()}{pulling[1:]}"
    return f"node {node} starts it"


def _holds(pod: Object, node: str) -> bool:
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return pod.get("spec", {}).get("nodeName") == node and not over


def asks(pod: Object, resource: str) -> float:
    """Give how much of a resource a pod's containers ask for together."""
    containers = pod.get("spec", {}).get("containers") or []
    return sum(quantity(((each.get("resources") or {}).get("requests") or {}).get(resource)) for each in containers)


def quantity(text: Any) -> float:
    """Read the API's way to write amounts (500m, 2Gi); nothing is 0."""
    return float(parse_quantity(text)) if text else 0.0


def amount(resource: str, number: float) -> str:
    """Write an amount as people do: memory and disk in GB (10⁹ bytes), all else as a number."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{number / 1e9:,.1f} GB"
    return f"{number:g}"
