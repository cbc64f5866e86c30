"""The executor's calls to one namespace, and the end of all of its Jobs so that nothing is left.

The controller's Role (k8s/base) grants each verb used here: jobs create, list, delete; services create; pods list,
delete; pods/log get; events list; cronjobs list; nodes list only if the cluster's admin grants it. With
`cluster.multi_node` other than indexed_job, a component adds the same verbs for that kind as for Jobs. Only with
targets in S3 are Secrets created and deleted, with the rights of the user who runs Snakemake.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypedDict

from kubernetes.client import ApiClient

from vlmflow.remote.cluster.api import Api, Object, Refused
from vlmflow.remote.cluster.groups import CONTAINER, INDEXED_JOB, JOBS, IndexedJob, nodes_of, service_of
from vlmflow.remote.kubernetes.job_shape import words_of
from vlmflow.remote.kubernetes.outcome import has_ended, is_lost, is_true
from vlmflow.remote.library import VlmflowError, counted

PASSING = ("exceeded quota", "specified trainingRuntime must be created before the TrainJob is created")
"""Words of refusals that may pass: Trainer can refuse a TrainJob before it has seen the runtime that was made first."""

HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that use resources of a node."""

UNTOLD = ("Scheduled", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Reasons of routine events, which explain nothing and which every pod has."""

IDLE_SECONDS = 60.0
"""How long to wait for Jobs without running pods: the cluster removes them in its own time."""


class _Named(TypedDict):
    name: str


class _Container(TypedDict, total=False):
    resources: dict[str, Any] | None


class _Spec(TypedDict, total=False):
    nodeName: str
    containers: list[_Container]


class _Status(TypedDict, total=False):
    phase: str
    allocatable: dict[str, str] | None


class _Item(TypedDict, total=False):
    metadata: _Named
    spec: _Spec
    status: _Status
    involvedObject: dict[str, Any]
    reason: str
    message: str
    lastTimestamp: str | None
    eventTime: str | None


class Items(TypedDict):
    """What is read of nodes, pods and events, of which there are many in a cluster.

    Skipping all else reduces the cost to a tenth: the API describes a node in kilobytes, most of them its images.
    """

    items: list[_Item]


class Namespace(Api):
    """One namespace of a cluster. Every method but `log_end` raises Refused if the API server refuses or fails.

    groups: the kind of object that several pods are. All methods name, list and delete such objects as Jobs.
    """

    def __init__(self, client: ApiClient, namespace: str, groups: IndexedJob = INDEXED_JOB) -> None:
        super().__init__(client, namespace)
        self.groups = groups
        self._may_see_nodes = True

    def jobs(self, selector: str = "") -> list[Object]:
        """List Jobs by their labels."""
        jobs = self.list(JOBS, selector)
        for path in self.groups.paths[-1:]:
            jobs += map(self.groups.as_job, self.list(path, selector))
        return jobs

    def pods(self, selector: str = "") -> list[Object]:
        """List pods by their labels."""
        return self.list("pods", selector)

    def holding_pods(self) -> list[Object]:
        """List all pods that use resources of a node, only with their requests."""
        return self.list("pods", fields=HOLDING, form=Items)

    def events(self) -> list[Object]:
        """List recent events that may explain something."""
        return self.list("events", fields=",".join(f"reason!={reason}" for reason in UNTOLD), form=Items)

    def nodes(self) -> list[Object] | None:
        """List the cluster's nodes with their capacity; None without the right to list them."""
        if self._may_see_nodes:
            try:
                return list(self.call("GET", "/api/v1/nodes", form=Items)["items"])
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
            self.create(JOBS, job)
            return
        name = job["metadata"]["name"]
        try:
            for path, body in self.groups.objects(job):
                self.create(path, body)
            for created in self.list(JOBS, fields=f"metadata.name={name}") if not self.groups.paths else ():
                self.create("services", service_of(created))
        except Refused:
            with suppress(Refused):
                self.delete_job(name)
            raise

    def delete_job(self, name: str, after_its_pods: bool = False) -> None:
        """Delete a Job, if it exists; its running pods get SIGTERM and their grace period.

        after_its_pods: the Job is removed last, so that its absence means that its pods are gone, where the kind allows
        it.
        """
        self.delete(JOBS, name, "Foreground" if after_its_pods else "Background")
        for path in reversed(self.groups.paths):
            self.delete(path, name, "Foreground" if after_its_pods and self.groups.foreground else "Background")

    def delete_rest(self, selector: str) -> None:
        """Delete what is left of groups with these labels, where a kind has objects that do not end with a group."""
        for path in self.groups.paths[:-1]:
            for left in self.list(path, selector):
                self.delete(path, left["metadata"]["name"])

    def log_end(self, pod: str, lines: int, nodes: int = 1) -> str:
        """Return the last lines of what a rule's container says, within the limit of `Api.log`; "" if there are none.

        nodes: how many pods the pod's Job has.
        """
        try:
            return self.log(pod, self.groups.container if nodes > 1 else CONTAINER, lines)
        except Refused:
            return ""


def is_refusal(refused: Refused) -> bool:
    """Return whether a create was refused permanently; after any other failure it may have succeeded."""
    return refused.status > 0 and not refused.for_now and not any(words in refused.why for words in PASSING)


def refuse_strangers(cluster: Namespace, selector: str) -> None:
    """Make sure that no Job with these labels still has work to do.

    Raises VlmflowError with their names: a run from another working directory makes the same targets.
    """
    if working := [job for job in cluster.jobs(selector) if not is_true(job, "Complete", "Failed")]:
        names = ", ".join(map(words_of, working))
        groups = [f"{plural}.{cluster.groups.api.partition('/')[0]}" for plural in cluster.groups.plurals[-1:]]
        kinds = ",".join(["jobs", *groups])
        raise VlmflowError(
            f"the same targets are made by {counted(len(working), 'Job')} of another working directory: {names}",
            f"wait until they end, or delete them: kubectl -n {cluster.namespace} delete {kinds} -l '{selector}'",
        )


def end_all(cluster: Namespace, selector: str, why: str, say: Callable[[str], None]) -> set[str]:
    """Delete all Jobs with these labels and their pods, and wait until they are gone, or at least none of them runs.

    why: the first sentence of the message, if there is anything to end. say: prints a message. Each pod has its own
    grace period; a pod on a node that does not answer is not waited for longer than that. The cluster may remove ended
    pods minutes later, for instance after an outage.

    Returns the names of the pods that existed and do not run any more, as far as is known.
    """
    jobs, pods = cluster.jobs(selector), cluster.pods(selector)
    idle_since, ended = time.monotonic(), set()
    if jobs:
        names = ", ".join(map(words_of, jobs))
        say(f"{why} Ending {counted(len(jobs), 'Job')}; their pods save their work first: {names}.")
    while True:
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                cluster.delete_job(job["metadata"]["name"], after_its_pods=True)
        # Without this, a pod that the cluster has not deleted yet would keep its GPUs for minutes.
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                cluster.delete("pods", pod["metadata"]["name"])
        running = [pod for pod in pods if not has_ended(pod)]
        ended |= {pod["metadata"]["name"] for pod in pods}
        idle_since = time.monotonic() if running else idle_since
        lost = [pod["metadata"]["name"] for pod in running if is_lost(pod, cluster.now())]
        if lost and len(lost) == len(running):
            say(f"These pods remain until their nodes, which do not answer, return or are deleted: {', '.join(lost)}.")
            ended -= set(lost)
            break
        if not running and not jobs:
            break
        if time.monotonic() - idle_since > IDLE_SECONDS:
            say(f"The cluster has not removed these Jobs yet, but no pod runs: {', '.join(map(words_of, jobs))}.")
            break
        time.sleep(0.5)
        jobs, pods = cluster.jobs(selector), cluster.pods(selector)
    cluster.delete_rest(selector)
    return ended
