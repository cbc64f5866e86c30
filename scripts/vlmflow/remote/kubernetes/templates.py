"""Kubernetes' strategic merge, as far as pod specs need it.

Lists merge by the keys of the API types:
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ ("patch strategy").

The API server and kubectl merge in this way. The Kubernetes client for Python has no function for it, and a Job must be
complete before the server sees it.

Isolates jobs from the controller: their pods hold no token, and mount nothing that the controller executes.

The controller's token may create Jobs, and a Job may mount any Secret of its namespace. A pod that could write what the
controller executes would get all of these rights.

The pod templates of k8s/templates, as the cluster's overlay made them: suspended CronJobs of the namespace.

A CronJob's own labels and annotations go to the Job (a queue's label belongs there), those of its pod template to the
pod. The executor reads these annotations of the CronJob:
    vlmflow/gpu-resource: the cluster's resource name of GPUs (nvidia.com/a100); default nvidia.com/gpu
    vlmflow/pending-limit: seconds after which a pod that still waits fails; by default it waits without limit
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.copying import PART_OF, selector
from vlmflow.remote.cluster.pods import CONTAINER, GPU_RESOURCE, NAMES, template_in
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.objects import STATE_CLAIM

MERGED_BY = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
"""Lists whose elements merge with the element of the same key."""

REPLACED_BY = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""Lists whose elements replace the element of the same key: two merged volume sources would be invalid."""

JOINED = {"tolerations"}
"""Lists that are joined: a pod may tolerate more, never less."""


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` merged into it; the patch wins. Neither is changed."""
    merged = deepcopy(base)
    for key, value in patch.items():
        merged[key] = _merged(key, merged.get(key), value)
    return merged


def _merged(key: str, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return merge(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        if key in MERGED_BY:
            return _by_key(MERGED_BY[key], ours, theirs, merge)
        if key in REPLACED_BY:
            return _by_key(REPLACED_BY[key], ours, theirs, lambda _, new: new)
        if key in JOINED:
            return [*ours, *(deepcopy(item) for item in theirs if item not in ours)]
    return deepcopy(theirs)


def _by_key(name: str, ours: list[Any], theirs: list[Any], join: Any) -> list[Any]:
    elements = {element[name]: element for element in ours}
    for element in theirs:
        there = elements.get(element[name])
        elements[element[name]] = deepcopy(element) if there is None else join(there, deepcopy(element))
    return list(elements.values())


CONTROLLER_ACCOUNT = "vlmflow-controller"
"""The service account with the controller's Role; an overlay may add to this name."""

SOURCES = "/workdir/.sources"
"""Where a pod puts the archive of the workflow's sources: on a volume of its own."""

DEPLOYS = re.compile(r"-m snakemake --deploy-sources [^&;|]+")


def refuse_reach(where: str, pod: Object, next_step: str) -> None:
    """Refuse a job's pod that could write what the controller executes, or call the API in its name.

    where: the start of the message. pod: a pod's spec. next_step: the next step of the message.

    Raises VlmflowError.
    """
    if pod.get("automountServiceAccountToken") is not False:
        raise VlmflowError(
            f"{where}: automountServiceAccountToken must be false: a job's pod may not hold a token", next_step
        )
    if CONTROLLER_ACCOUNT in (pod.get("serviceAccountName") or ""):
        raise VlmflowError(
            f"{where}: serviceAccountName is {pod['serviceAccountName']}, the controller's own account", next_step
        )
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if STATE_CLAIM in claim:
            raise VlmflowError(
                f"{where}: volume {volume['name']} is the claim {claim}, which holds what the controller executes",
                next_step,
            )
        for source in (volume.get("projected") or {}).get("sources") or []:
            # The API server ignores a token for another audience (a cloud's identity service).
            if "serviceAccountToken" in source and not source["serviceAccountToken"].get("audience"):
                raise VlmflowError(
                    f"{where}: volume {volume['name']} holds a token for the API server (a serviceAccountToken "
                    "without an audience)",
                    next_step,
                )


def with_private_sources(command: str) -> str:
    """Return the command with the archive of the sources in a folder that the pod alone can write.

    Snakemake compares the archive with the sha256 in the command, and then opens it again to unpack it. In the folder
    for outputs, on the volume of all jobs, another pod could replace it in between.
    """
    return DEPLOYS.sub(lambda found: f"{found[0].rstrip()} --local-storage-prefix {SOURCES} ", command, count=1)


DEFAULT, GPU = "default", "gpu"
PENDING_LIMIT = "vlmflow/pending-limit"
DECIDES = {
    "activeDeadlineSeconds": "the rule's resource runtime decides it",
    "nodeName": "the scheduler decides it; select nodes by affinity",
}
"""Keys of a pod's spec that no template may set, and what decides them."""

RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

NEXT = "fix it under k8s/templates or in the overlay, then run `kubectl apply -k k8s/overlays/NAME` again"


@dataclass(frozen=True)
class Template:
    """One checked pod template.

    job_metadata, pod_metadata: labels and annotations; spec: the pod's. pending_limit: seconds, or None.
    """

    name: str
    job_metadata: Object
    pod_metadata: Object
    spec: Object
    gpu_resource: str = "nvidia.com/gpu"
    pending_limit: float | None = None


def check_files(folder: Path) -> None:
    """Check a checkout's own templates, without the patches of an overlay.

    Raises VlmflowError with the file of the first wrong one.
    """
    for file in sorted(folder.glob("*.yaml")):
        try:
            for found in yaml.safe_load_all(file.read_text()):
                if found["kind"] == "CronJob":
                    read_template(_suspended(found))
                elif found["kind"] == "PodTemplate":  # a copy of an older one; k8s/README.md
                    read_template(found)
        except VlmflowError as error:
            raise VlmflowError(f"{file}: {error.cause}", error.next_step) from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise VlmflowError(f"{file}: {error}", "fix the YAML") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise VlmflowError(
                f"{file}: the YAML does not describe Kubernetes objects as `kubectl explain cronjob` does ({error!r})",
                NEXT,
            ) from None


def of_namespace(cluster: Namespace, warn: Callable[[str], None]) -> dict[str, Template]:
    """Return a namespace's checked templates by name. warn: prints which PodTemplates remain.

    Raises VlmflowError if one is wrong or missing.
    """
    found = cluster.pod_templates(selector())
    if found.warning():
        warn(f"namespace {cluster.name} has {found.warning()}\n  what to do: {found.next_step()}")
    return read_templates(found.templates, cluster.name)


def read_templates(objects: list[Object], namespace: str) -> dict[str, Template]:
    """Return the checked templates by name. Raises VlmflowError if one is wrong or missing."""
    templates = {template.name: template for template in map(read_template, objects)}
    missing = [name for name in NAMES if name not in templates]
    if missing:
        raise VlmflowError(
            f"namespace {namespace} has no pod template {', '.join(missing)} (with the label {PART_OF})",
            "`kubectl apply -k k8s/overlays/NAME` makes them",
        )
    return templates


def read_template(found: Object) -> Template:
    """Turn one {metadata, template} into a Template. Raises VlmflowError if it sets what only the rule may set."""
    metadata = found["metadata"]
    where = f"pod template {metadata['name']}"
    template = found.get("template") or {}
    spec = template.get("spec") or {}
    _check_container(where, spec)
    refuse_reach(where, spec, NEXT)
    annotations = metadata.get("annotations") or {}
    return Template(
        name=metadata["name"],
        job_metadata={"labels": metadata.get("labels") or {}, "annotations": _plain(annotations)},
        pod_metadata={
            "labels": (template.get("metadata") or {}).get("labels") or {},
            "annotations": (template.get("metadata") or {}).get("annotations") or {},
        },
        spec=spec,
        gpu_resource=_gpu_resource(where, annotations),
        pending_limit=_pending_limit(where, annotations),
    )


def _suspended(cron_job: Object) -> Object:
    template = template_in(cron_job)
    if template is None:
        raise VlmflowError(f"pod template {cron_job['metadata']['name']}: its CronJob lacks spec.suspend: true", NEXT)
    return template


def choose(templates: dict[str, Template], named: str | None, gpus: int) -> Template:
    """Return the template of a job: the one that its rule names, else `gpu` for a job with GPUs, else `default`.

    Raises VlmflowError for an unknown name.
    """
    name = named or (GPU if gpus else DEFAULT)
    if name not in templates:
        raise VlmflowError(
            f"the rule's resource pod_template is {name!r}; the namespace has only {', '.join(templates)}",
            f"use one of these, or add it to the overlay, with the label {PART_OF}, and apply the overlay again",
        )
    return templates[name]


def _check_container(where: str, spec: Object) -> None:
    mains = [container for container in spec.get("containers") or [] if container.get("name") == CONTAINER]
    if len(mains) != 1:
        raise VlmflowError(f"{where}: has no container named {CONTAINER} to run the rule", NEXT)
    if "args" in mains[0]:
        raise VlmflowError(
            f"{where}: container {CONTAINER} must not set args: the rule's command goes there (command is kept)", NEXT
        )
    for key in DECIDES:
        if key in spec:
            raise VlmflowError(f"{where}: must not set spec.{key}; {DECIDES[key]}", NEXT)
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        image = container.get("image") or ""
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@" not in image and tag in ("", "latest"):
            raise VlmflowError(f"{where}: image {image!r} has no tag or digest, so two pulls may differ", NEXT)


def _gpu_resource(where: str, annotations: Object) -> str:
    name: str = annotations.get(GPU_RESOURCE, Template.gpu_resource)
    if not RESOURCE_NAME.fullmatch(name):
        raise VlmflowError(f"{where}: annotation {GPU_RESOURCE} is {name!r}, not a name like nvidia.com/gpu", NEXT)
    return name


def _pending_limit(where: str, annotations: Object) -> float | None:
    text = annotations.get(PENDING_LIMIT)
    if text is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise VlmflowError(f"{where}: annotation {PENDING_LIMIT} is {text!r}, not a number of seconds", NEXT)
    return float(text)


def _plain(annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the annotations without kubectl's own."""
    return {key: value for key, value in annotations.items() if not key.startswith("kubectl.kubernetes.io/")}
