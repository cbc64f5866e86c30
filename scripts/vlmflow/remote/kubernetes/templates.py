"""The pod templates of k8s/templates, as the cluster's overlay made them: read, checked, and merged into a pod.

They are suspended CronJobs of the namespace, which never start anything by themselves. A CronJob's own labels and
annotations go to the Job (a queue's label belongs there), those of its pod template to the pod. The executor reads
these annotations of the CronJob:
    vlmflow/gpu-resource: the cluster's resource name of GPUs (nvidia.com/a100); default nvidia.com/gpu
    vlmflow/pending-limit: seconds after which a pod that still waits fails; by default it waits without limit

Jobs are isolated from the controller: their pods hold no token, and mount nothing that the controller executes. Its
token may create Jobs, and a Job may mount any Secret of its namespace: a pod that could write what the controller
executes would get all of these rights.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.cluster.groups import CONTAINER
from vlmflow.remote.cluster.kubectl import PART_OF, own_selector, short_name
from vlmflow.remote.library import VlmflowError

CRON_JOBS = "batch/v1/cronjobs"

NAMES = ("default", "fetch", "gpu", "train")
"""The templates that every namespace must have; an overlay may have more, as `answer` and `search`, for few runs."""

GPU_RESOURCE = "vlmflow/gpu-resource"
PENDING_LIMIT = "vlmflow/pending-limit"

RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

DECIDES = {
    "activeDeadlineSeconds": "the rule's resource runtime decides it",
    "nodeName": "the scheduler decides it; select nodes by affinity",
}
"""Keys of a pod's spec that no template may set, and what decides them."""

CONTROLLER_ACCOUNT = "vlmflow-controller"
"""The service account with the controller's Role; an overlay may add to this name."""

STATE_CLAIM = "controller-state"
"""The claim with what the controller executes: its checkout, .snakemake, the requested run. An overlay may add to this
name."""

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
            for document in yaml.safe_load_all(file.read_text()):
                if document["kind"] == "CronJob":
                    template, name = template_in(document), document["metadata"]["name"]
                    if template is None:
                        raise VlmflowError(f"pod template {name}: its CronJob lacks spec.suspend: true", NEXT)
                    read_template(template)
        except VlmflowError as error:
            raise VlmflowError(f"{file}: {error.cause}", error.next_step) from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise VlmflowError(f"{file}: {error}", "fix the YAML") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise VlmflowError(
                f"{file}: the YAML does not describe Kubernetes objects as `kubectl explain cronjob` does ({error!r})",
                NEXT,
            ) from None


def templates_of(api: Api) -> list[Object]:
    """Return the namespace's templates, each as {metadata, template}, with its name in k8s/templates, which rules use.

    Raises Refused.
    """
    templates = [template for job in api.list(CRON_JOBS, own_selector()) if (template := template_in(job))]
    for template in templates:
        template["metadata"]["name"] = short_name(template["metadata"]["name"])
    return templates


def template_in(cron_job: Object) -> Object | None:
    """Return the template in a suspended CronJob, as {metadata, template}; None if it is not suspended."""
    spec = cron_job["spec"]
    if not spec.get("suspend"):
        return None
    return {"metadata": cron_job["metadata"], "template": spec["jobTemplate"]["spec"]["template"]}


def read_templates(objects: list[Object], namespace: str) -> dict[str, Template]:
    """Return the checked templates by name. Raises VlmflowError if one is wrong or missing."""
    templates = {template.name: template for template in map(read_template, objects)}
    if missing := [name for name in NAMES if name not in templates]:
        raise VlmflowError(
            f"namespace {namespace} has no pod template {', '.join(missing)} (with the label {PART_OF})",
            "`kubectl apply -k k8s/overlays/NAME` makes them",
        )
    return templates


def read_template(template: Object) -> Template:
    """Turn one {metadata, template} into a Template. Raises VlmflowError if it sets what only the rule may set."""
    metadata = template["metadata"]
    where = f"pod template {metadata['name']}"
    pod = template.get("template") or {}
    spec, pod_metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    for fault in _faults_of_containers(spec):
        raise VlmflowError(f"{where}: {fault}", NEXT)
    refuse_reach(where, spec, NEXT)
    annotations = metadata.get("annotations") or {}
    gpu_resource = annotations.get(GPU_RESOURCE, Template.gpu_resource)
    if not RESOURCE_NAME.fullmatch(gpu_resource):
        raise VlmflowError(
            f"{where}: annotation {GPU_RESOURCE} is {gpu_resource!r}, not a name like nvidia.com/gpu", NEXT
        )
    limit = annotations.get(PENDING_LIMIT)
    if limit is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", limit):
        raise VlmflowError(f"{where}: annotation {PENDING_LIMIT} is {limit!r}, not a number of seconds", NEXT)
    not_kubectls = {key: text for key, text in annotations.items() if not key.startswith("kubectl.kubernetes.io/")}
    return Template(
        name=metadata["name"],
        job_metadata={"labels": metadata.get("labels") or {}, "annotations": not_kubectls},
        pod_metadata={key: pod_metadata.get(key) or {} for key in ("labels", "annotations")},
        spec=spec,
        gpu_resource=gpu_resource,
        pending_limit=None if limit is None else float(limit),
    )


def _faults_of_containers(spec: Object) -> Iterator[str]:
    """Yield what is wrong with a template's containers, or set for them; after the first, nothing is certain."""
    mains = [container for container in spec.get("containers") or [] if container.get("name") == CONTAINER]
    if len(mains) != 1:
        yield f"has no container named {CONTAINER} to run the rule"
    if "args" in mains[0]:
        yield f"container {CONTAINER} must not set args: the rule's command goes there (command is kept)"
    for key in DECIDES:
        if key in spec:
            yield f"must not set spec.{key}; {DECIDES[key]}"
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        image = container.get("image") or ""
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@" not in image and tag in ("", "latest"):
            yield f"image {image!r} has no tag or digest, so two pulls may differ"


def refuse_reach(where: str, pod: Object, next_step: str) -> None:
    """Refuse a job's pod that could write what the controller executes, or call the API in its name.

    where: the start of the message. pod: a pod's spec. next_step: the next step of the message.

    Raises VlmflowError.
    """
    for fault in _faults_of_reach(pod):
        raise VlmflowError(f"{where}: {fault}", next_step)


def _faults_of_reach(pod: Object) -> Iterator[str]:
    if pod.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false: a job's pod may not hold a token"
    if CONTROLLER_ACCOUNT in (pod.get("serviceAccountName") or ""):
        yield f"serviceAccountName is {pod['serviceAccountName']}, the controller's own account"
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if STATE_CLAIM in claim:
            yield f"volume {volume['name']} is the claim {claim}, which holds what the controller executes"
        for source in (volume.get("projected") or {}).get("sources") or []:
            # The API server ignores a token for another audience (a cloud's identity service).
            if "serviceAccountToken" in source and not source["serviceAccountToken"].get("audience"):
                token = "a token for the API server (a serviceAccountToken without an audience)"  # noqa: S105
                yield f"volume {volume['name']} holds {token}"


def choose(templates: dict[str, Template], named: str | None, gpus: int) -> Template:
    """Return the template of a job: the one that its rule names, else `gpu` for a job with GPUs, else `default`.

    Raises VlmflowError for an unknown name.
    """
    name = named or ("gpu" if gpus else "default")
    if name not in templates:
        raise VlmflowError(
            f"the rule's resource pod_template is {name!r}; the namespace has only {', '.join(templates)}",
            f"use one of these, or add it to the overlay, with the label {PART_OF}, and apply the overlay again",
        )
    return templates[name]


MERGED_BY = {
    **dict.fromkeys(("containers", "initContainers", "ephemeralContainers", "imagePullSecrets"), "name"),
    "ports": "containerPort",
}
"""Lists whose elements merge with the element of the same key."""

REPLACED_BY = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""Lists whose elements replace the element of the same key: two merged volume sources would be invalid."""

JOINED = {"tolerations"}
"""Lists that are joined: a pod may tolerate more, never less."""


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` merged into it; the patch wins. Neither is changed.

    This is Kubernetes' strategic merge, as far as pod specs need it: lists merge by the keys of the API types
    (https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/, "patch strategy"). The Kubernetes
    client for Python has no function for it, and a Job must be complete before the server sees it.
    """
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
