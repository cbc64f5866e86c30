"""What is read of lists that grow with the cluster; all else of them is skipped, which costs a tenth.

A node has kilobytes in the API, most of them the images that it holds.
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
    """Nodes, and what pods may have of each."""

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
    """Pods, and what they hold of their nodes."""

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
    """Events, as harness.kubernetes.events reads them."""

    items: list[_Event]
