"""Jobs, their pods and a shared volume for tests, as plain API dictionaries."""

import os
from pathlib import Path

from cluster.kubectl import Kubectl
from cluster.shell import wait_for
from vlmflow.core.errors import VlmflowError

USER = 1000
"""The numeric user of the project's images."""

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""A container's security context that the Pod Security Standard `restricted` allows."""


def job(name: str, command: list[str], image: str, resources: dict[str, str] | None = None, **pod: object) -> dict:
    """Return a Job of one pod and no retry that runs a command in an image of the node's store.

    resources: requests and limits; pod: fields that override the pod's spec.
    """
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "resources": {"requests": resources or {}, "limits": resources or {}},
        "securityContext": RESTRICTED,
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container], **pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": spec}},
    }


def with_volume(made: dict, claim: str, path: str) -> dict:
    """Mount a claim at a path of a Job's container, and return the Job."""
    spec = made["spec"]["template"]["spec"]
    spec.setdefault("volumes", []).append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    spec["containers"][0].setdefault("volumeMounts", []).append({"name": claim, "mountPath": path})
    return made


def run(cluster: Kubectl, made: dict, namespace: str = "default", limit: float = 180.0) -> str:
    """Create a Job, wait for its end, and return its pod's log.

    Raises VlmflowError with the pod's status and log if it fails or takes longer than limit seconds.
    """
    cluster.apply(made, namespace)
    name = made["metadata"]["name"]

    def ended() -> str | None:
        conditions = cluster.get("job", name, namespace)["status"].get("conditions", ())
        return next((each["type"] for each in conditions if each["type"] in ("Complete", "Failed")), None)

    how = wait_for(f"the Job {name} ends", ended, limit, pause=0.2)
    log = cluster.kubectl("logs", f"job/{name}", f"--namespace={namespace}")
    if how == "Failed":
        status = pod_of(cluster, name, namespace)["status"]
        raise VlmflowError(f"the Job {name} failed: {status.get('containerStatuses')}\n{log}", "read its pod's log")
    return log


def pod_of(cluster: Kubectl, name: str, namespace: str = "default") -> dict:
    """Return the newest pod of a Job, waiting some seconds for it to be made."""

    def newest() -> dict | None:
        pods = cluster.get("pods", namespace=namespace, labels=f"batch.kubernetes.io/job-name={name}")["items"]
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)

    return wait_for(f"the Job {name} has a pod", newest, 15)


def phase(cluster: Kubectl, pod: str, namespace: str = "default") -> str:
    """Return a pod's phase: Pending, Running, Succeeded, Failed or Unknown."""
    return cluster.get("pod", pod, namespace)["status"]["phase"]


def shared_volume(claim: str, folder: Path, namespace: str = "default", size: str = "10Gi") -> list[dict]:
    """Return a ReadWriteMany claim and the volume that it is bound to: a folder of this machine, on every node.

    The folder is made, owned by USER: a kubelet never applies fsGroup to a hostPath.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, USER, USER)
    volume = f"{namespace}-{claim}"
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **common,
                "capacity": {"storage": size},
                "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": namespace, "name": claim},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**common, "volumeName": volume, "resources": {"requests": {"storage": size}}},
        },
    ]
