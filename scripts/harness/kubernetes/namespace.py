"""The executor's calls to one namespace; objects are plain dicts as the API returns them.

The controller's Role (k8s/base) grants each verb used here: jobs create, list, delete; services create; pods list,
delete; pods/log get; events list; cronjobs list, and podtemplates list for this release; nodes list only if the
cluster's admin grants it. Only with targets in S3 are Secrets created and deleted, with the rights of the user who runs
Snakemake.
"""

from datetime import datetime

from kubernetes.client import ApiClient

from harness.kubernetes import answers
from vlmflow.cluster import pod_templates
from vlmflow.cluster.api import Api, Object
from vlmflow.cluster.client import Refused

JOBS = "batch/v1/jobs"

HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that use resources of a node."""

UNTOLD = ("Scheduled", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Reasons of routine events, which explain nothing and which every pod has."""


class Namespace:
    """One namespace of a cluster. Every method but `log_end` raises Refused if the API server refuses or fails."""

    def __init__(self, name: str, client: ApiClient) -> None:
        self.name = name
        self._api = Api(client, name)
        self._may_see_nodes = True

    def now(self) -> datetime:
        """Return the time of the API server's clock, which also sets its timestamps."""
        return self._api.now()

    def jobs(self, selector: str = "", name: str = "") -> list[Object]:
        """List Jobs by their labels, or the one of a name."""
        return self._api.list(JOBS, selector, f"metadata.name={name}" if name else "")

    def pods(self, selector: str = "") -> list[Object]:
        """List pods by their labels."""
        return self._api.list("pods", selector)

    def holding_pods(self) -> list[Object]:
        """List all pods that use resources of a node, only with their requests (answers.Pods)."""
        return self._api.list("pods", fields=HOLDING, answer=answers.Pods)

    def pod_names(self) -> set[str]:
        """Return the names of all pods."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def events(self) -> list[Object]:
        """List recent events that may explain something (answers.Events)."""
        fields = ",".join(f"reason!={reason}" for reason in UNTOLD)
        return self._api.list("events", fields=fields, answer=answers.Events)

    def pod_templates(self, selector: str) -> pod_templates.TemplatesFound:
        """Return the pod templates with these labels."""
        return pod_templates.pod_templates(lambda kind: self._api.list(kind, selector))

    def nodes(self) -> list[Object] | None:
        """List the cluster's nodes, only with their capacity (answers.Nodes); None without the right to list them."""
        if self._may_see_nodes:
            try:
                nodes: list[Object] = self._api.call("GET", "/api/v1/nodes", answer=answers.Nodes)["items"]
                return nodes
            except Refused as refused:
                if refused.status != 403:
                    raise
                self._may_see_nodes = False
        return None

    def create_job(self, job: Object) -> None:
        """Create a Job. An existing one of this name is the same Job, created by a try whose answer was lost."""
        self._api.create(JOBS, job)

    def create_service(self, service: Object) -> None:
        """Create a Service; an existing one of this name is the same."""
        self._api.create("services", service)

    def delete_job(self, name: str, after_its_pods: bool = False) -> None:
        """Delete a Job, if it exists; its running pods get SIGTERM and their grace period.

        after_its_pods: the Job is removed last, so that its absence means that its pods are gone.
        """
        self._api.delete(JOBS, name, "Foreground" if after_its_pods else "Background")

    def delete_pod(self, name: str) -> None:
        """Delete a pod, if it exists; if it runs, it gets SIGTERM and its grace period."""
        self._api.delete("pods", name)

    def delete_secret(self, name: str) -> None:
        """Delete a Secret, if it exists."""
        self._api.delete("secrets", name)

    def log_end(self, pod: str, container: str, lines: int) -> str:
        """Return the last lines of a pod's log, within the limit of `Api.log`; "" if the API gives none."""
        try:
            return self._api.log(pod, container, lines)
        except Refused:
            return ""


def is_refusal(refused: Refused) -> bool:
    """Return whether a create was refused permanently; after any other failure it may have succeeded."""
    return refused.status > 0 and not refused.for_now and "exceeded quota" not in refused.why
