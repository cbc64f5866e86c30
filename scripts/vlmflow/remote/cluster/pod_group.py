"""Several pods that belong together: an Indexed Job, whose pods find each other by a headless Service.

`remote.cluster.group_kinds` makes objects of other kinds of such a Job.

A group has the name of its attempt, and a Job that is created again has another name; so a pod of an earlier attempt
finds neither the Service nor the files of this one.
"""

import re
from copy import deepcopy
from typing import Any

from vlmflow.core.attempt import ATTEMPT, NODE_0
from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.pod_templates import CONTAINER

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
