"""The pod templates of a namespace: suspended CronJobs, which never start anything by themselves.

This release also reads PodTemplates, which older overlays made; a CronJob of the same name takes precedence.

Several pods that belong together: an Indexed Job, whose pods find each other by a headless Service.

`remote.cluster.group_kinds` makes objects of other kinds of such a Job.

A group has the name of its attempt, and a Job that is created again has another name; so a pod of an earlier attempt
finds neither the Service nor the files of this one.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from vlmflow.core.child_programs import ATTEMPT, NODE_0
from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.copying import selector, short

CRON_JOBS, POD_TEMPLATES = "batch/v1/cronjobs", "podtemplates"

NAMES = ("default", "fetch", "gpu", "train")
"""The templates that every namespace must have; an overlay may have more, as `answer` and `search`, for few runs."""

CONTAINER = "snakemake"
"""The container of a template that runs the rule; the executor plugin uses this name."""

GPU_RESOURCE = "vlmflow/gpu-resource"
"""The annotation with the cluster's resource name of GPUs; default nvidia.com/gpu."""

MIGRATION = "k8s/README.md, From PodTemplates to CronJobs"


@dataclass(frozen=True)
class TemplatesFound:
    """The pod templates of a namespace.

    templates: each as {metadata, template}, with its name in k8s/templates, which rules use.
    old: names of those that are PodTemplates. unread: names of PodTemplates that also exist as CronJobs.
    """

    templates: list[Object]
    old: list[str]
    unread: list[str]

    def warning(self) -> str:
        """Return which PodTemplates remain; "" if none."""
        said = []
        if self.old:
            said.append(f"PodTemplates, which the next release will not read: {', '.join(self.old)}")
        if self.unread:
            said.append(f"PodTemplates that are ignored, since CronJobs have their names: {', '.join(self.unread)}")
        return "; ".join(said)

    def next_step(self) -> str:
        """Return what to do about remaining PodTemplates."""
        apply = f"apply the overlay, which makes CronJobs ({MIGRATION}), then " if self.old else ""
        return f"{apply}run `kubectl delete podtemplates -n NAMESPACE -l '{selector()}'`"


def pod_templates(objects: Callable[[str], list[Object]]) -> TemplatesFound:
    """Return the pod templates of a namespace.

    objects: lists the objects of a kind; may raise Refused.

    A kind that the user may not list counts as empty: ClusterRole `admin` does not allow PodTemplates
    (https://kubernetes.io/docs/reference/access-authn-authz/rbac/#user-facing-roles), the Role of older overlays does
    not allow CronJobs. Raises the refusal of CronJobs if there are no PodTemplates either; any other failure at once.
    """
    refused = None
    try:
        current = [held for each in objects(CRON_JOBS) if (held := template_in(each))]
    except Refused as error:
        if error.status != 403:
            raise
        current, refused = [], error
    try:
        old = objects(POD_TEMPLATES)
    except Refused as error:
        if error.status != 403:
            raise
        old = []
    if refused and not old:
        raise refused
    templates = {short(each["metadata"]["name"]): each for each in current}
    old_ones = {short(each["metadata"]["name"]): each for each in old}
    return TemplatesFound(
        templates=[_named(name, each) for name, each in (old_ones | templates).items()],
        old=sorted(old_ones.keys() - templates.keys()),
        unread=sorted(old_ones.keys() & templates.keys()),
    )


def template_in(cron_job: Object) -> Object | None:
    """Return the template in a suspended CronJob, as {metadata, template}; None if it is not suspended."""
    spec = cron_job["spec"]
    if not spec.get("suspend"):
        return None
    return {"metadata": cron_job["metadata"], "template": spec["jobTemplate"]["spec"]["template"]}


def _named(name: str, template: Object) -> Object:
    return template | {"metadata": template["metadata"] | {"name": name}}


GROUP = "vlmflow/group"
"""The label of a group's pods: the attempt's name. Policies, affinities and the Service select by it."""

NODE = "JOB_COMPLETION_INDEX"
"""The environment variable with a pod's number, from the Job controller."""

NODE_LABEL = "batch.kubernetes.io/job-completion-index"
"""The label with a pod's number, or in clusters before 1.28 the annotation."""

REPLICA_LABEL = "training.kubeflow.org/replica-index"
"""The label with a pod's number in a PyTorchJob."""

RULE_CONTAINERS = {"training.kubeflow.org/job-name": "pytorch", "jobset.sigs.k8s.io/jobset-name": "node"}
"""The container that runs the rule, by a label that the pods of another kind of group have."""


def with_pods(job: Object, nodes: int) -> Object:
    """Return a Job with so many pods, which has no name yet (`named`)."""
    job = deepcopy(job)
    job["spec"] |= {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        # Pod 0 decides: the others may wait for it when it has found nothing to do. Before 1.31 this has no effect.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }
    return job


def named(job: Object, name: str) -> Object:
    """Return a Job under the name of its attempt, which all that belongs to a group's attempt has too."""
    job = deepcopy(job)
    job["metadata"]["name"] = name
    pod = job["spec"]["template"]
    group = name if nodes_of(job) > 1 else None
    if "affinity" in pod["spec"] or "topologySpreadConstraints" in pod["spec"]:
        _place(pod["spec"], group)
    if group:
        for metadata in (job["metadata"], pod.setdefault("metadata", {})):
            metadata["labels"] = {**(metadata.get("labels") or {}), GROUP: group}
        pod["spec"]["subdomain"] = group
        variables = {ATTEMPT: group, NODE_0: f"{group}-0.{group}"}
        container = main_container(job)
        kept = [each for each in container.get("env") or [] if each["name"] not in variables]
        container["env"] = [*kept, *({"name": key, "value": value} for key, value in variables.items())]
    return job


def service_of(job: Object) -> Object:
    """Return the Service that gives a group's pods their names, also before they are ready. It ends with the Job.

    job: as the API returned it.
    """
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": metadata["name"], "labels": metadata["labels"], "ownerReferences": [owner]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {GROUP: metadata["name"]},
        },
    }


def nodes_of(job: Object | None) -> int:
    """Return how many pods a Job has at a time."""
    return int((job or {}).get("spec", {}).get("completions") or 1)


def node_of(pod: Object) -> int:
    """Return the number of a pod in its group; 0 in a Job of one pod."""
    labels, annotations = (pod["metadata"].get(key) or {} for key in ("labels", "annotations"))
    said = labels.get(NODE_LABEL) or annotations.get(NODE_LABEL) or labels.get(REPLICA_LABEL) or "0"
    return int(said) if re.fullmatch("[0-9]{1,9}", said) else 0


def job_of(pod: Object) -> str:
    """Return the name of a pod's Job; of a group's pod that of the attempt, also where an operator made another Job."""
    labels = pod["metadata"]["labels"]
    name: str = labels.get(GROUP) or labels.get("job-name", "")
    return name


def rule_container(pod: Object) -> str:
    """Return the name of the container of a pod that runs the rule."""
    labels = pod["metadata"].get("labels") or {}
    return next((name for label, name in RULE_CONTAINERS.items() if label in labels), CONTAINER)


def main_container(job: Object) -> Any:
    """Return the container of a Job that runs the rule."""
    return next(each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == CONTAINER)


def _place(spec: Object, group: str | None) -> None:
    """Make what a template says about pods with the label GROUP mean this group's pods; without a group, remove it."""
    affinity = spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        for when, terms in (affinity.get(kind) or {}).items():
            affinity[kind][when] = [term for term in terms if _means(term.get("podAffinityTerm") or term, group)]
    if "topologySpreadConstraints" in spec:
        spread = spec["topologySpreadConstraints"] or []
        spec["topologySpreadConstraints"] = [each for each in spread if _means(each, group)]


def _means(term: Object, group: str | None) -> bool:
    """Narrow a term to a group if it selects by GROUP; returns whether it is to be kept."""
    selector = term.get("labelSelector") or {}
    expressions = selector.get("matchExpressions") or []
    others = [each for each in expressions if each.get("key") != GROUP]
    if len(others) == len(expressions):
        return True
    term["labelSelector"] = {"matchLabels": {**(selector.get("matchLabels") or {}), GROUP: group}}
    if others:
        term["labelSelector"]["matchExpressions"] = others
    return group is not None
