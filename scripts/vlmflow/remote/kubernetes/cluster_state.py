"""What explains why Jobs wait: the namespace's events, the nodes' capacity and the pods' requests.

One reading serves every waiting Job, so sums over nodes and pods are computed once for each resource.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from kubernetes.utils.quantity import parse_quantity

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.kubernetes.events import by_object, newest_of


class Room(NamedTuple):
    """Of one resource: the capacity of the largest node, and the most that is free on one node."""

    largest: float
    free: float


class ClusterState:
    """A namespace at one moment.

    pods: all that are known. nodes: None without the right to list them; then only the scheduler's message is shown.
    """

    def __init__(
        self, pods: Iterable[Object] = (), events: Iterable[Object] = (), nodes: list[Object] | None = None
    ) -> None:
        self._holding = [pod for pod in pods if _holds(pod)]
        self._events = by_object(events)
        self._nodes = nodes
        self._rooms: dict[str, Room | None] = {}

    def latest(self, kind: str, name: str, reasons: Collection[str]) -> Object | None:
        """Return the newest event of an object with one of these reasons, or None."""
        return newest_of(self._events.get((kind, name), []), reasons)

    def room(self, resource: str) -> Room | None:
        """Return what nodes have of a resource; None without the right to list nodes."""
        if resource not in self._rooms:
            self._rooms[resource] = self._sum(resource)
        return self._rooms[resource]

    def _sum(self, resource: str) -> Room | None:
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
        return Room(max(has.values(), default=0.0), max(free.values(), default=0.0))


def _holds(pod: Object) -> bool:
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod.get("spec", {}).get("nodeName")) and not over


def requests(pod: Object, resource: str) -> float:
    """Return how much of a resource a pod's containers request together."""
    containers = pod.get("spec", {}).get("containers") or []
    return sum(quantity(((each.get("resources") or {}).get("requests") or {}).get(resource)) for each in containers)


@lru_cache(maxsize=4096)
def quantity(text: Any) -> float:
    """Parse an amount as the API writes it (500m, 2Gi); None or "" gives 0."""
    return float(parse_quantity(text)) if text else 0.0


def amount(resource: str, number: float) -> str:
    """Format an amount for people: memory and disk in GB (10⁹ bytes), others as a number."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{number / 1e9:,.1f} GB"
    return f"{number:g}"
