"""The pod templates of k8s/templates, as the cluster's overlay made them: suspended CronJobs of the namespace.

A CronJob's own labels and annotations go to the Job (a queue's label belongs there), those of its pod template to the
pod. The executor reads these annotations of the CronJob:
    vlmflow/gpu-resource: the cluster's resource name of GPUs (nvidia.com/a100); default nvidia.com/gpu
    vlmflow/pending-limit: seconds after which a pod that still waits fails; by default it waits without limit
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.instance import PART_OF, selector
from vlmflow.remote.cluster.pod_templates import CONTAINER, GPU_RESOURCE, NAMES, template_in
from vlmflow.remote.kubernetes.isolation import refuse_reach
from vlmflow.remote.kubernetes.namespace import Namespace

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
