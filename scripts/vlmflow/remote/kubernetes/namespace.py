"""The fields that are read from lists that grow with the cluster. Skipping the others reduces the cost to a tenth.

The API describes a node in kilobytes, most of them its images.

Events: reports of the cluster's components about an object. By default they are kept for an hour.

The executor's calls to one namespace; objects are plain dicts as the API returns them.

The controller's Role (k8s/base) grants each verb used here: jobs create, list, delete; services create; pods list,
delete; pods/log get; events list; cronjobs list, and podtemplates list for this release; nodes list only if the
cluster's admin grants it. With `cluster.multi_node` other than indexed_job, a component adds the same verbs for that
kind as for Jobs. Only with targets in S3 are Secrets created and deleted, with the rights of the user who runs
Snakemake.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import datetime
from typing import NotRequired, TypedDict

from kubernetes.client import ApiClient

from vlmflow.remote.cluster.api import Api, Object, Refused
from vlmflow.remote.cluster.group_kinds import INDEXED_JOB, JOBS, IndexedJob
from vlmflow.remote.cluster.pods import CONTAINER, TemplatesFound, nodes_of, pod_templates, service_of

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
    """Events, as remote.kubernetes.namespace reads them."""

    items: list[_Event]


def by_object(events: Iterable[Object]) -> dict[tuple[str | None, str | None], list[Object]]:
    """Group events by the kind and name of their object."""
    found: dict[tuple[str | None, str | None], list[Object]] = {}
    for event in events:
        about = event["involvedObject"]
        found.setdefault((about.get("kind"), about.get("name")), []).append(event)
    return found


def newest_of(events: Iterable[Object], reasons: Collection[str]) -> Object | None:
    """Return the event that was last seen with one of these reasons (`Failed`, `Pulling`); None without one."""
    return max((event for event in events if event.get("reason") in reasons), key=time_of, default=None)


def time_of(event: Object | None) -> str:
    """Return when an event was last seen, as the API writes times; "" for None."""
    return (event or {}).get("lastTimestamp") or (event or {}).get("eventTime") or ""


def message_of(event: Object | None) -> str:
    """Return what an event says for people, without white space around it; "" for None."""
    return ((event or {}).get("message") or "").strip()


PASSING = ("exceeded quota", "specified trainingRuntime must be created before the TrainJob is created")
"""Words of refusals that may pass: Trainer can refuse a TrainJob before it has seen the runtime that was made first."""

HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that use resources of a node."""

UNTOLD = ("Scheduled", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Reasons of routine events, which explain nothing and which every pod has."""


class Namespace:
    """One namespace of a cluster. Every method but `log_end` raises Refused if the API server refuses or fails.

    groups: the kind of object that several pods are. All methods name, list and delete such objects as Jobs.
    """

    def __init__(self, name: str, client: ApiClient, groups: IndexedJob = INDEXED_JOB) -> None:
        self.name = name
        self.groups = groups
        self._api = Api(client, name)
        self._may_see_nodes = True

    def now(self) -> datetime:
        """Return the time of the API server's clock, which also sets its timestamps."""
        return self._api.now()

    @property
    def kinds(self) -> str:
        """The kinds of objects that `jobs` lists, as kubectl takes them."""
        groups = [".".join([plural, self.groups.api.partition("/")[0]]) for plural in self.groups.plurals[-1:]]
        return ",".join(["jobs", *groups])

    def jobs(self, selector: str = "") -> list[Object]:
        """List Jobs by their labels."""
        jobs = self._api.list(JOBS, selector)
        for path in self.groups.paths[-1:]:
            jobs += map(self.groups.as_job, self._api.list(path, selector))
        return jobs

    def pods(self, selector: str = "") -> list[Object]:
        """List pods by their labels."""
        return self._api.list("pods", selector)

    def holding_pods(self) -> list[Object]:
        """List all pods that use resources of a node, only with their requests (http_answers.Pods)."""
        return self._api.list("pods", fields=HOLDING, answer=Pods)

    def pod_names(self) -> set[str]:
        """Return the names of all pods of the namespace, also of those that no Job made."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def events(self) -> list[Object]:
        """List recent events that may explain something (http_answers.Events)."""
        fields = ",".join(f"reason!={reason}" for reason in UNTOLD)
        return self._api.list("events", fields=fields, answer=Events)

    def pod_templates(self, selector: str) -> TemplatesFound:
        """Return the pod templates with these labels."""
        return pod_templates(lambda kind: self._api.list(kind, selector))

    def nodes(self) -> list[Object] | None:
        """List the cluster's nodes with their capacity (http_answers.Nodes); None without the right to list them."""
        if self._may_see_nodes:
            try:
                nodes: list[Object] = self._api.call("GET", "/api/v1/nodes", answer=Nodes)["items"]
                return nodes
            except Refused as refused:
                if refused.status != 403:
                    raise
                self._may_see_nodes = False
        return None

    def create_job(self, job: Object) -> None:
        """Create a Job; one of several pods as its kind, all of it or nothing: its pods would not meet.

        An existing one of this name is the same Job, created by a try whose answer was lost.
        """
        if nodes_of(job) == 1:
            self._api.create(JOBS, job)
            return
        name = job["metadata"]["name"]
        try:
            for path, one in self.groups.objects(job):
                self._api.create(path, one)
            for created in self._api.list(JOBS, fields=f"metadata.name={name}") if not self.groups.paths else ():
                self.create_service(service_of(created))
        except Refused:
            with suppress(Refused):
                self.delete_job(name)
            raise

    def create_service(self, service: Object) -> None:
        """Create a Service; an existing one of this name is the same."""
        self._api.create("services", service)

    def delete_job(self, name: str, after_its_pods: bool = False) -> None:
        """Delete a Job, if it exists; its running pods get SIGTERM and their grace period.

        after_its_pods: the Job is removed last, so that its absence means that its pods are gone, where the kind allows
        it.
        """
        self._api.delete(JOBS, name, "Foreground" if after_its_pods else "Background")
        for path in reversed(self.groups.paths):
            self._api.delete(path, name, "Foreground" if after_its_pods and self.groups.foreground else "Background")

    def delete_rest(self, selector: str) -> None:
        """Delete what is left of groups with these labels, where a kind has objects that do not end with a group."""
        for path in self.groups.paths[:-1]:
            for left in self._api.list(path, selector):
                self._api.delete(path, left["metadata"]["name"])

    def delete_pod(self, name: str) -> None:
        """Delete a pod, if it exists; if it runs, it gets SIGTERM and its grace period."""
        self._api.delete("pods", name)

    def delete_secret(self, name: str) -> None:
        """Delete a Secret, if it exists."""
        self._api.delete("secrets", name)

    def log_end(self, pod: str, lines: int, nodes: int = 1) -> str:
        """Return the last lines of what a rule's container says, within the limit of `Api.log`; "" if there are none.

        nodes: how many pods the pod's Job has.
        """
        try:
            return self._api.log(pod, self.groups.container if nodes > 1 else CONTAINER, lines)
        except Refused:
            return ""


def is_refusal(refused: Refused) -> bool:
    """Return whether a create was refused permanently; after any other failure it may have succeeded."""
    return refused.status > 0 and not refused.for_now and not any(words in refused.why for words in PASSING)
