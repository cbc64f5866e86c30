"""What the executor asks of one namespace, in plain dicts as the API gives them.

Each verb here is a line in the controller's Role (k8s/base): jobs create, list, delete; pods list, delete; pods/log
get; events list; cronjobs list, and podtemplates list for this release; where the cluster grants it, nodes list.
Secrets are made and deleted where targets lie in S3 alone, with the rights of who runs Snakemake.
"""

import json
from datetime import datetime
from typing import Any

import urllib3
from kubernetes.client import ApiClient, CoreV1Api
from kubernetes.client.rest import ApiException

from harness.kubernetes import answers
from vlmflow.cluster import pod_templates
from vlmflow.cluster.api import path_of

Object = dict[str, Any]
"""A Kubernetes object as its JSON says it."""

FAILURES = (ApiException, urllib3.exceptions.HTTPError)
"""What a call ends with when the server's patience or ours is over."""

HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that hold something of a node."""

UNTOLD = ("Scheduled", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Reasons of events that explain nothing, of which every pod has some."""

LOG_TIMEOUT = (5, 10)
"""Seconds to connect, and to wait for a log: the API server asks the pod's node, which may be lost."""

LOG_READ, LOG_KEPT = 32 << 20, 1 << 20
"""Bytes of a log's last lines that are read, and of their end that are kept: a line may have any length."""


class Namespace:
    """One namespace of a cluster."""

    def __init__(self, name: str, api: ApiClient) -> None:
        self.name = name
        self.api = api
        self._may_see_nodes = True

    def now(self) -> datetime:
        """Give the time by the API server's clock, which its time stamps have."""
        return self.api.rest_client.now()

    def jobs(self, selector: str) -> list[Object]:
        """List Jobs by their labels."""
        return self._list(self._path("batch/v1/jobs"), selector)

    def pods(self, selector: str = "") -> list[Object]:
        """List pods by their labels."""
        return self._list(self._path("pods"), selector)

    def holding_pods(self) -> list[Object]:
        """List all pods that hold something of a node, with what they ask for alone (answers.Pods)."""
        return self._list(self._path("pods"), fields=HOLDING, answer=answers.Pods)

    def pod_names(self) -> set[str]:
        """Name all pods."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def events(self) -> list[Object]:
        """List what the cluster's parts said lately that may explain something (answers.Events)."""
        fields = ",".join(f"reason!={reason}" for reason in UNTOLD)
        return self._list(self._path("events"), fields=fields, answer=answers.Events)

    def pod_templates(self, selector: str) -> pod_templates.PodTemplates:
        """Give the pod templates by their labels."""
        return pod_templates.pod_templates(lambda kind: self._list(self._path(kind), selector), ApiException)

    def nodes(self) -> list[Object] | None:
        """List the cluster's nodes, with what they have alone (answers.Nodes); None where that is not granted."""
        if self._may_see_nodes:
            try:
                return self._list("/api/v1/nodes", answer=answers.Nodes)
            except ApiException as error:
                if error.status != 403:
                    raise
                self._may_see_nodes = False
        return None

    def create_job(self, job: Object) -> None:
        """Create a Job; one of the same name is this one, created by a try whose answer was lost."""
        self._create(self._path("batch/v1/jobs"), job)

    def delete_job(self, name: str, after_its_pods: bool = False) -> None:
        """Delete a Job, whose pods get SIGTERM and their grace where they still run; fine if it is gone.

        after_its_pods: the Job itself goes last, so that its absence tells that its pods are gone.
        """
        policy = "Foreground" if after_its_pods else "Background"
        self._delete(f"{self._path('batch/v1/jobs')}/{name}", {"propagationPolicy": policy})

    def delete_pod(self, name: str) -> None:
        """Delete a pod, which gets SIGTERM and its grace where it still runs; fine if it is gone."""
        self._delete(f"{self._path('pods')}/{name}", {})

    def delete_secret(self, name: str) -> None:
        """Delete a Secret; fine if it is gone."""
        self._delete(f"{self._path('secrets')}/{name}", {})

    def log_end(self, pod: str, container: str, lines: int) -> str:
        """Give the last lines of a pod's log, LOG_KEPT bytes at most; nothing where there is none to be had."""
        try:
            # Unread: the client would make Python's text of a log that happens to be JSON.
            found = CoreV1Api(self.api).read_namespaced_pod_log(
                pod,
                self.name,
                container=container,
                tail_lines=lines,
                limit_bytes=LOG_READ,
                _request_timeout=LOG_TIMEOUT,
                _preload_content=False,
            )
            kept = bytearray()
            for part in found.stream(1 << 16):
                kept += part
                del kept[:-LOG_KEPT]
            return kept.decode(errors="replace")
        except FAILURES:
            return ""

    def _path(self, kind: str) -> str:
        return path_of(kind, self.name)

    def _list(self, path: str, selector: str = "", fields: str = "", answer: Any = "object") -> list[Object]:
        query = [("labelSelector", selector), ("fieldSelector", fields)]
        return self._call("GET", path, query=[each for each in query if each[1]], answer=answer)["items"]

    def _create(self, path: str, body: Object) -> None:
        try:
            self._call("POST", path, body)
        except ApiException as error:
            if error.status != 409 or reason_of(error) != "AlreadyExists":
                raise

    def _delete(self, path: str, options: Object) -> None:
        try:
            self._call("DELETE", path, options)
        except ApiException as error:
            if error.status != 404:
                raise

    def _call(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        answer: Any = "object",
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        return self.api.call_api(
            path,
            verb,
            query_params=query or [],
            header_params=headers,
            body=body,
            response_type=answer,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
        )


def is_refusal(error: Exception) -> bool:
    """Tell whether a create was refused for good; of any other failure nobody knows whether it was done."""
    if not isinstance(error, ApiException) or not error.status:  # 0: TLS broke off
        return False
    if error.status >= 500 or error.status in (408, 429):
        return False
    return reason_of(error) != "Conflict" and "exceeded quota" not in message_of(error)


def reason_of(error: ApiException) -> str:
    """Give the API's own word for a refusal (AlreadyExists, Forbidden, Invalid), or nothing."""
    return str(_status(error).get("reason", ""))


def message_of(error: Exception) -> str:
    """Say why a call failed, in the API's words where it has any."""
    if isinstance(error, ApiException):
        return str(_status(error).get("message") or f"{error.status} {error.reason}")
    return f"{type(error).__name__}: {error}"


def _status(error: ApiException) -> Object:
    try:
        status = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
