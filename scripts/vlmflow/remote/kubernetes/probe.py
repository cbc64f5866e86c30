"""Jobs that check the cluster from inside: pods of a template, with our command."""

import copy
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from vlmflow.remote.cluster.api import Api, Object, Refused
from vlmflow.remote.cluster.group_kinds import JOBS
from vlmflow.remote.cluster.pods import CONTAINER, main_container, named, node_of, service_of, with_pods

POLL = 1.0
LIFETIME = 900
"""Seconds after which the cluster removes an ended probe, if this process has died."""

DEADLINE = 3600
"""Seconds after which the cluster ends a probe. They include the pull of the image, which may take half an hour."""

PASSING = ("Operation cannot be fulfilled", "status unknown for quota")
"""Refusals after which the Job controller retries: two pods met in one quota, or a quota is not counted yet."""


Said = TypeVar("Said", bound=msgspec.Struct)
"""What a probe prints, as JSON."""


@dataclass(frozen=True)
class Answer(Generic[Said]):
    """The result of a probe.

    image: the image that it ran. node: where it ran.
    made, ended: the API server's clock when the Job was created and when its end was seen.
    said: what it printed last; None if it printed nothing of this form. fault: why there is no answer.
    """

    image: str
    made: datetime | None = None
    ended: datetime | None = None
    said: Said | None = None
    fault: str = ""
    node: str = ""


class Probe(Generic[Said]):
    """One Job, created at once; `answer` waits for it and deletes it."""

    def __init__(
        self,
        api: Api,
        template: Object,
        command: list[str],
        resources: dict[str, str],
        form: type[Said],
        elsewhere_than: str = "",
        nodes: int = 1,
    ) -> None:
        """Create the Job. form: of the line of JSON that the command prints; the others are those of `job`."""
        self._api = api
        self._form = form
        self._name = f"vlmflow-doctor-{uuid.uuid4().hex[:8]}"
        self._fault = ""
        self._made = None
        body = job(self._name, template, command, resources, elsewhere_than, nodes)
        self._image = main_container(body)["image"]
        try:
            api.create(JOBS, body)
            for created in api.list(JOBS, fields=f"metadata.name={self._name}") if nodes > 1 else ():
                api.create("services", service_of(created))
            self._made = api.now()
        except Refused as refused:
            self._fault = f"the Job was refused: {refused}"

    def answer(self, patience: float) -> Answer[Said]:
        """Wait up to `patience` seconds for the pod to end; returns its answer, or why there is none."""
        if self._fault:
            return Answer(self._image, fault=self._fault)
        try:
            return self._wait(time.monotonic() + patience)
        except Refused as refused:
            return Answer(self._image, fault=str(refused))
        finally:
            self.remove()

    def remove(self) -> None:
        """Delete the Job and its pod; if the API server does not answer, DEADLINE and LIFETIME end them."""
        with suppress(Refused):
            self._api.delete(JOBS, self._name)

    def _wait(self, until: float) -> Answer[Said]:
        pod: Object = {}
        while True:
            pods = self._api.list("pods", f"job-name={self._name}")
            pod = min(pods, key=_decides, default={})
            phase = pod.get("status", {}).get("phase")
            if phase in ("Succeeded", "Failed"):
                break
            if not pod and (why := refusal(self._api.list("events"), self._name)):
                return Answer(self._image, fault=f"its pod is refused: {why}")
            if time.monotonic() > until or image_fails(pod):
                return Answer(self._image, fault=f"its pod does not start: {why_not_running(pod)}")
            time.sleep(POLL)
        log = self._api.log(pod["metadata"]["name"], CONTAINER)
        said = last_of_form(log, self._form)
        fault = "" if said is not None else f"its pod ended as {phase}: {log.strip()[-500:] or why_not_running(pod)}"
        return Answer(self._image, self._made, self._api.now(), said, fault, pod["spec"].get("nodeName", ""))


def refusal(events: list[Object], job_name: str) -> str:
    """Return why the Job controller cannot create a Job's pod (a quota, Pod Security); empty if nothing prevents it."""
    for event in events:
        if event["involvedObject"].get("name") == job_name and event.get("reason") == "FailedCreate":
            message: str = event.get("message", "")
            if not any(words in message for words in PASSING):
                return message
    return ""


def job(
    name: str,
    template: Object,
    command: list[str],
    resources: dict[str, str],
    elsewhere_than: str = "",
    nodes: int = 1,
) -> Object:
    """Return the Job of a probe: the template's pod with another command and other resources.

    resources: its requests and limits. elsewhere_than: a node on which it must not run. nodes: so many pods.
    """
    metadata, pod = copy.deepcopy(template["metadata"]), copy.deepcopy(template["template"])
    pod["spec"] |= {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE,
        "terminationGracePeriodSeconds": 5,
    }
    if elsewhere_than:
        _keep_off(pod["spec"], elsewhere_than)
    labels = {"app.kubernetes.io/part-of": "vlmflow", "app.kubernetes.io/component": "doctor"}
    own = pod.get("metadata") or {}
    pod["metadata"] = {"labels": (own.get("labels") or {}) | labels, "annotations": own.get("annotations") or {}}
    made = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        # The Job carries a queue's label, like those of a run: a cluster may suspend or refuse Jobs without one.
        "metadata": {"labels": (metadata.get("labels") or {}) | labels},
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": LIFETIME, "template": pod},
    }
    container = main_container(made)
    container.pop("args", None)
    container |= {"command": command, "resources": {"requests": resources, "limits": resources}}
    return named(with_pods(made, nodes) if nodes > 1 else made, name)


def _decides(pod: Object) -> tuple[bool, bool, int]:
    """Return a key by which the pod comes first that decides about a probe: a failed one, one that waits, or pod 0."""
    phase = pod.get("status", {}).get("phase")
    return phase != "Failed", phase != "Pending", node_of(pod)


def _keep_off(spec: Object, node: str) -> None:
    """Exclude one node from those that a pod may use. A node needs to match only one term, so each term excludes it."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    for term in required["nodeSelectorTerms"]:
        term.setdefault("matchFields", []).append({"key": "metadata.name", "operator": "NotIn", "values": [node]})


def image_fails(pod: Object) -> bool:
    """Return whether the pod's image cannot be pulled, so that waiting does not help."""
    return any(reason in ("ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName") for reason, _ in _waiting(pod))


def why_not_running(pod: Object) -> str:
    """Return what a pod waits for, or why it ended, as the cluster reports it."""
    status = pod.get("status", {})
    words = [f"{reason}: {message}" for reason, message in _waiting(pod)]
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            words.append(condition.get("message", condition.get("reason", "")))
    words += [status[key] for key in ("reason", "message") if status.get(key)]
    for container in status.get("containerStatuses") or []:
        ended = container["state"].get("terminated")
        if ended:
            words.append(f"{ended.get('reason', 'ended')}, exit code {ended['exitCode']}")
    return "; ".join(words) or (
        "the cluster gives no reason" if pod else "the Job has no pod yet; kubectl describe job"
    )


def last_of_form(log: str, form: type[Said]) -> Said | None:
    """Return the last line of a log that is JSON of this form, decoded; None if there is none."""
    for line in reversed(log.splitlines()):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=form)
    return None


def _waiting(pod: Object) -> list[tuple[str, str]]:
    states = [container["state"] for container in pod.get("status", {}).get("containerStatuses") or []]
    return [
        (state["waiting"].get("reason", ""), state["waiting"].get("message", ""))
        for state in states
        if "waiting" in state
    ]
