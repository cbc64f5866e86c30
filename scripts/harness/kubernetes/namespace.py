"""What the executor asks of one namespace, in plain dicts as the API gives them.

Each verb here is a line in the controller's Role (k8s/base): jobs create, list, delete; pods list, delete; pods/log
get; events list; cronjobs list, and podtemplates list for this release; where the cluster grants it, nodes list.
Secrets are made and deleted where targets lie in S3 alone, with the rights of who runs Snakemake.
"""

from datetime import datetime

from kubernetes.client import ApiClient

from harness.kubernetes import answers
from vlmflow.cluster import pod_templates
from vlmflow.cluster.api import Api, Object
from vlmflow.cluster.client import Refused

JOBS = "batch/v1/jobs"

HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that hold something of a node."""

UNTOLD = ("Scheduled", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Reasons of events that explain nothing, of which every pod has some."""


class Namespace:
    """One namespace of a cluster. Every method but `log_end` raises Refused where the API server does not do it."""

    def __init__(self, name: str, client: ApiClient) -> None:
        self.name = name
        self._api = Api(client, name)
        self._may_see_nodes = True

    def now(self) -> datetime:
        """Give the time by the API server's clock, which its time stamps have."""
        return self._api.now()

    def jobs(self, selector: str) -> list[Object]:
        """List Jobs by their labels."""
        return self._api.list(JOBS, selector)

    def pods(self, selector: str = "") -> list[Object]:
        """List pods by their labels."""
        return self._api.list("pods", selector)

    def holding_pods(self) -> list[Object]:
        """List all pods that hold something of a node, with what they ask for alone (answers.Pods)."""
        return self._api.list("pods", fields=HOLDING, answer=answers.Pods)

    def pod_names(self) -> set[str]:
        """Name all pods."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def events(self) -> list[Object]:
        """List what the cluster's parts said lately that may explain something (answers.Events)."""
        fields = ",".join(f"reason!={reason}" for reason in UNTOLD)
        return self._api.list("events", fields=fields, answer=answers.Events)

    def pod_templates(self, selector: str) -> pod_templates.TemplatesFound:
        """Give the pod templates by their labels."""
        return pod_templates.pod_templates(lambda kind: self._api.list(kind, selector))

    def nodes(self) -> list[Object] | None:
        """List the cluster's nodes, with what they have alone (answers.Nodes); None where that is not granted."""
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
        """Create a Job; one of the same name is this one, created by a try whose answer was lost."""
        self._api.create(JOBS, job)

    def delete_job(self, name: str, after_its_pods: bool = False) -> None:
        """Delete a Job, whose pods get SIGTERM and their grace where they still run; fine if it is gone.

        after_its_pods: the Job itself goes last, so that its absence tells that its pods are gone.
        """
        self._api.delete(JOBS, name, "Foreground" if after_its_pods else "Background")

    def delete_pod(self, name: str) -> None:
        """Delete a pod, which gets SIGTERM and its grace where it still runs; fine if it is gone."""
        self._api.delete("pods", name)

    def delete_secret(self, name: str) -> None:
        """Delete a Secret; fine if it is gone."""
        self._api.delete("secrets", name)

    def log_end(self, pod: str, container: str, lines: int) -> str:
        """Give the last lines of a pod's log, as far as `Api.log` keeps them; nothing where there is none to be had."""
        try:
            return self._api.log(pod, container, lines)
        except Refused:
            return ""


def is_refusal(refused: Refused) -> bool:
    """Tell whether a create was refused for good; of any other failure nobody knows whether it was done."""
    return refused.status > 0 and not refused.for_now and "exceeded quota" not in refused.why
