"""Several pods that belong together: an Indexed Job, or one of Kubeflow's objects, PyTorchJob and TrainJob.

The pods of an Indexed Job find each other by a headless Service. A group has the name of its attempt, and a Job that is
created again has another name; so a pod of an earlier attempt finds neither the Service nor the files of this one.

Everything else knows only Jobs: a kind makes its objects of our finished Job, and shows what the cluster has as a Job.
What the operators give their pods, and what they do when one ends: tests/remote/cluster/test_operators.py, and
https://github.com/kubeflow/trainer at v1.9.3 (Training Operator) and v2.1.0 (Trainer).
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.library import ATTEMPT, NODE_0, VlmflowError

JOBS = "batch/v1/jobs"

CONTAINER = "snakemake"
"""The container of a template that runs the rule; the executor plugin uses this name."""

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
    """Return a Job with so many pods, which has no name yet (`as_attempt`)."""
    job = deepcopy(job)
    job["spec"] |= {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        # Pod 0 decides: the others may wait for it when it has found nothing to do. Before 1.31 this has no effect.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }
    return job


def as_attempt(job: Object, name: str) -> Object:
    """Return a Job under the name of its attempt, which all that belongs to a group's attempt has too."""
    job = deepcopy(job)
    job["metadata"]["name"] = name
    pod = job["spec"]["template"]
    group = name if nodes_of(job) > 1 else None
    _narrow(pod["spec"], group)
    if group:
        for metadata in (job["metadata"], pod.setdefault("metadata", {})):
            metadata["labels"] = {**(metadata.get("labels") or {}), GROUP: group}
        pod["spec"]["subdomain"] = group
        variables = {ATTEMPT: group, NODE_0: f"{group}-0.{group}"}
        container = main_container(job)
        kept = [variable for variable in container.get("env") or [] if variable["name"] not in variables]
        container["env"] = [*kept, *as_variables(variables)]
    return job


def as_variables(values: Mapping[str, str]) -> list[Object]:
    """Return environment variables in the form of a container's spec."""
    return [{"name": name, "value": value} for name, value in values.items()]


def _narrow(spec: Object, group: str | None) -> None:
    """Make what a template says about pods with the label GROUP mean this group's pods; without a group, remove it."""
    affinity = spec.get("affinity") or {}
    for sort in ("podAffinity", "podAntiAffinity"):
        for when, terms in (affinity.get(sort) or {}).items():
            affinity[sort][when] = [term for term in terms if _is_kept(term.get("podAffinityTerm") or term, group)]
    if "topologySpreadConstraints" in spec:
        constraints = spec["topologySpreadConstraints"] or []
        spec["topologySpreadConstraints"] = [constraint for constraint in constraints if _is_kept(constraint, group)]


def _is_kept(term: Object, group: str | None) -> bool:
    """Narrow a term to a group if it selects by GROUP; returns whether it is to be kept."""
    selector = term.get("labelSelector") or {}
    expressions = selector.get("matchExpressions") or []
    others = [expression for expression in expressions if expression.get("key") != GROUP]
    if len(others) == len(expressions):
        return True
    term["labelSelector"] = {"matchLabels": {**(selector.get("matchLabels") or {}), GROUP: group}}
    if others:
        term["labelSelector"]["matchExpressions"] = others
    return group is not None


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
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {GROUP: metadata["name"]}},
    }


def nodes_of(job: Object | None) -> int:
    """Return how many pods a Job has at a time."""
    return int((job or {}).get("spec", {}).get("completions") or 1)


def node_of(pod: Object) -> int:
    """Return the number of a pod in its group; 0 in a Job of one pod."""
    labels, annotations = (pod["metadata"].get(key) or {} for key in ("labels", "annotations"))
    return _number(labels.get(NODE_LABEL) or annotations.get(NODE_LABEL) or labels.get(REPLICA_LABEL)) or 0


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None


def job_of(pod: Object) -> str:
    """Return the name of a pod's Job; of a group's pod that of the attempt, also where an operator made another Job."""
    labels = pod["metadata"]["labels"]
    return str(labels.get(GROUP) or labels.get("job-name", ""))


def rule_container(pod: Object) -> str:
    """Return the name of the container of a pod that runs the rule."""
    labels = pod["metadata"].get("labels") or {}
    return next((name for label, name in RULE_CONTAINERS.items() if label in labels), CONTAINER)


def main_container(job: Object) -> Any:
    """Return the container of a Job that runs the rule."""
    containers = job["spec"]["template"]["spec"]["containers"]
    return next(container for container in containers if container["name"] == CONTAINER)


NODES = "vlmflow/nodes"
"""The annotation of a TrainJob with the number of its pods, which only its TrainingRuntime says otherwise."""


class IndexedJob:
    """The Job itself, whose pods find each other by a Service of ours; also the base of the other kinds.

    name: in `cluster.multi_node`. api, plurals: its own objects, in the order of their creation; the last one is the
    group. kind: of that. container: the name that the rule's container must have. operator: who makes the pods.
    foreground: whether the object may be kept until its pods are gone; Trainer would make a JobSet again that it sees
    deleted before its TrainJob.
    """

    name = "indexed_job"
    api = "batch/v1"
    plurals: tuple[str, ...] = ()
    kind = "Job"
    container = CONTAINER
    operator = ""
    foreground = True

    @property
    def paths(self) -> list[str]:
        """Its own objects, as the API's clients name them; Jobs are not among them."""
        return [f"{self.api}/{plural}" for plural in self.plurals]

    def objects(self, job: Object) -> list[tuple[str, Object]]:
        """Return what to create for an attempt, in this order, each with its path. job: from `as_attempt`."""
        return [(JOBS, job)]

    def refused_at(self, name: str) -> list[tuple[str, str, str]]:
        """Return where the cluster says that it cannot create the pods of a group with this name.

        Each is the kind and name of an object, and the reason of its event.
        """
        return [("Job", name, "FailedCreate")]

    def as_job(self, group: Object) -> Object:
        """Return an object of this kind as a Job, with what decides about its outcome."""
        conditions = [
            condition | {"type": "Complete" if condition["type"] == "Succeeded" else condition["type"]}
            for condition in (group.get("status") or {}).get("conditions") or []
        ]
        spec, status = self._spec(group), {"conditions": conditions}
        return {"kind": self.kind, "metadata": group["metadata"], "spec": spec, "status": status}

    def _spec(self, group: Object) -> Object:
        return dict(group["spec"])

    def _pods(self, job: Object, node_0: str, *variables: Object) -> Object:
        """Return the pod template of a Job for an operator. node_0: the host name of node 0. variables: also set."""
        job = deepcopy(job)
        container, template = main_container(job), job["spec"]["template"]
        del template["spec"]["subdomain"]  # of our Service
        container["name"] = self.container
        for variable in container["env"]:
            if variable["name"] == NODE_0:
                variable["value"] = node_0
        container["env"] += variables
        return dict(template)


class PyTorchJob(IndexedJob):
    """A PyTorchJob of workers alone: beside a Master each worker gets a container that `restricted` refuses."""

    name = "pytorchjob"
    api = "kubeflow.org/v1"
    plurals = ("pytorchjobs",)
    kind = "PyTorchJob"
    container = "pytorch"
    operator = "Kubeflow Training Operator 1.9"

    def objects(self, job: Object) -> list[tuple[str, Object]]:
        """Return the PyTorchJob, whose label gives each pod its number; its variables are for groups with a Master."""
        name, spec = job["metadata"]["name"], job["spec"]
        number = {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{REPLICA_LABEL}']"}}}
        pods = self._pods(job, f"{name}-worker-0", number)
        worker = {"replicas": spec["completions"], "restartPolicy": "Never", "template": pods}
        kept = {key: spec[key] for key in ("ttlSecondsAfterFinished",) if key in spec}
        # Without this policy the other pods would run on after a failure.
        made = {"runPolicy": {"cleanPodPolicy": "Running", **kept}, "pytorchReplicaSpecs": {"Worker": worker}}
        return [(self.paths[0], _object(self, self.kind, job, made))]

    def refused_at(self, name: str) -> list[tuple[str, str, str]]:
        """Return where the Training Operator says it."""
        return [("PyTorchJob", name, "FailedCreatePod")]

    def _spec(self, group: Object) -> Object:
        spec = group["spec"]
        nodes = (spec["pytorchReplicaSpecs"].get("Worker") or {}).get("replicas")
        return {"completions": nodes or 1, "suspend": (spec.get("runPolicy") or {}).get("suspend")}


class TrainJob(IndexedJob):
    """A TrainJob and its TrainingRuntime, which holds everything and needs no administrator.

    Trainer makes a JobSet of them, and that a Job. The runtime does not end with its TrainJob.
    """

    name = "trainjob"
    api = "trainer.kubeflow.org/v1alpha1"
    plurals = ("trainingruntimes", "trainjobs")
    kind = "TrainJob"
    container = "node"
    operator = "Kubeflow Trainer 2.1"
    foreground = False

    def objects(self, job: Object) -> list[tuple[str, Object]]:
        """Return the runtime and the TrainJob; without an `mlPolicy.torch`, Trainer adds no variables for torchrun."""
        name, nodes = job["metadata"]["name"], job["spec"]["completions"]
        pods = {"backoffLimit": 0, "template": self._pods(job, f"{name}-node-0-0.{name}")}
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        replicated = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": pods}}
        runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": {"replicatedJobs": [replicated]}}}
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
        train_job = _object(self, self.kind, job, {"runtimeRef": reference})
        train_job["metadata"]["annotations"] = {**(job["metadata"].get("annotations") or {}), NODES: str(nodes)}
        return list(zip(self.paths, (_object(self, "TrainingRuntime", job, runtime), train_job), strict=True))

    def refused_at(self, name: str) -> list[tuple[str, str, str]]:
        """Return where JobSet's Job, or Trainer, says it."""
        return [("Job", f"{name}-node-0", "FailedCreate"), ("TrainJob", name, "TrainJobResourcesCreationFailed")]

    def _spec(self, group: Object) -> Object:
        nodes = _number((group["metadata"].get("annotations") or {}).get(NODES))
        return {"completions": 1 if nodes is None else nodes, "suspend": group["spec"].get("suspend")}


def _object(group: IndexedJob, kind: str, job: Object, spec: Object) -> Object:
    metadata = {key: job["metadata"][key] for key in ("name", "labels", "annotations") if key in job["metadata"]}
    return {"apiVersion": group.api, "kind": kind, "metadata": deepcopy(metadata), "spec": spec}


INDEXED_JOB, PYTORCHJOB, TRAINJOB = IndexedJob(), PyTorchJob(), TrainJob()

KINDS: dict[str, IndexedJob] = {kind.name: kind for kind in (INDEXED_JOB, PYTORCHJOB, TRAINJOB)}
"""All kinds, by their names in `cluster.multi_node`."""


def kind_of(job: Object) -> IndexedJob:
    """Return the kind of a Job that the API or `as_job` returned."""
    return next((kind for kind in KINDS.values() if kind.kind == job.get("kind")), INDEXED_JOB)


def check_served(api: Api, kind: IndexedJob) -> None:
    """Make sure that the cluster serves the objects of a kind. That their operator runs, only its pods will show.

    Raises VlmflowError with what to do. Every account may ask this (ClusterRole system:discovery).
    """
    if kind is INDEXED_JOB:
        return
    group, _, version = kind.api.partition("/")
    served, resources = (api.get_path(f"/apis/{path}") or {} for path in (group, kind.api))
    versions = ", ".join(served["version"] for served in served.get("versions") or [])
    names = {resource["name"] for resource in resources.get("resources") or []}
    if lacks := [plural for plural in kind.plurals if plural not in names]:
        which = f"serves {group} in {versions}" if versions else f"does not serve {group}"
        raise VlmflowError(
            f"cluster.multi_node is {kind.name}: the cluster {which}, and has no {' and '.join(lacks)} of {version}",
            f"let an administrator install {kind.operator}, or set cluster.multi_node: {INDEXED_JOB.name}",
        )
