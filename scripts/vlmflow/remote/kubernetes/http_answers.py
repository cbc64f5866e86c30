"""The fields that are read from lists that grow with the cluster. Skipping the others reduces the cost to a tenth.

The API describes a node in kilobytes, most of them its images.
"""

from typing import NotRequired, TypedDict

Amounts = dict[str, str]


class _Named(TypedDict):
    name: str


class _NodeStatus(TypedDict, total=False):
    allocatable: Amounts | None


class _Node(TypedDict):
    metadata: _Named
    status: _NodeStatus


class Nodes(TypedDict):
    """Nodes, and what each offers to pods."""

    items: list[_Node]


class _Resources(TypedDict, total=False):
    requests: Amounts | None


class _Container(TypedDict):
    resources: NotRequired[_Resources | None]


class _PodSpec(TypedDict):
    nodeName: NotRequired[str]
    containers: list[_Container]


class _PodStatus(TypedDict, total=False):
    phase: str


class _Pod(TypedDict):
    metadata: _Named
    spec: _PodSpec
    status: _PodStatus


class Pods(TypedDict):
    """Pods, and what they request of their nodes."""

    items: list[_Pod]


class _About(TypedDict, total=False):
    kind: str
    name: str


class _Event(TypedDict):
    involvedObject: _About
    reason: NotRequired[str]
    message: NotRequired[str]
    lastTimestamp: NotRequired[str | None]
    eventTime: NotRequired[str | None]


class Events(TypedDict):
    """Events, as remote.kubernetes.events reads them."""

    items: list[_Event]
