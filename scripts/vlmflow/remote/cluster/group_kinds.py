"""The objects that a group of pods can be: an Indexed Job, or one of Kubeflow's, PyTorchJob and TrainJob.

Everything else knows only Jobs: a kind makes its objects of our finished Job, and shows what the cluster has as a Job.
What the operators give their pods, and what they do when one ends: tests/remote/cluster/test_operators.py, and
https://github.com/kubeflow/trainer at v1.9.3 (Training Operator) and v2.1.0 (Trainer).
"""

import re
from copy import deepcopy
from typing import Any

from vlmflow.core.child_programs import NODE_0
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Api, Object, Refused
from vlmflow.remote.cluster.pods import CONTAINER, NODE, REPLICA_LABEL

JOBS = "batch/v1/jobs"

NODES = "vlmflow/nodes"
"""The annotation of a TrainJob with the number of its pods, which only its TrainingRuntime says otherwise."""

Place = tuple[str, str, str]
"""Where the cluster says that it cannot create a pod: the kind and name of an object, the reason of its event."""


class IndexedJob:
    """The Job itself, whose pods find each other by a Service of ours; also the base of the other kinds.

    name: in `cluster.multi_node`. api, plurals: its own objects, in the order of their creation; the last one is the
    group. kind: of that. container: the name that the rule's container must have. operator: who makes the pods.
    component: the folder of k8s/components with the controller's rights. foreground: whether the object may be kept
    until its pods are gone; Trainer would make a JobSet again that it sees deleted before its TrainJob.
    """

    name = "indexed_job"
    api = "batch/v1"
    plurals: tuple[str, ...] = ()
    kind = "Job"
    container = CONTAINER
    operator = ""
    component = ""
    foreground = True

    @property
    def paths(self) -> list[str]:
        """Its own objects, as the API's clients name kinds; Jobs are not among them."""
        return [f"{self.api}/{plural}" for plural in self.plurals]

    def objects(self, job: Object) -> list[tuple[str, Object]]:
        """Return what to create for an attempt, in this order, each with its path. job: from `pod_group.named`."""
        return [(JOBS, job)]

    def refused_at(self, name: str) -> list[Place]:
        """Return where the cluster says that it cannot create the pods of a group with this name."""
        return [("Job", name, "FailedCreate")]

    def as_job(self, found: Object) -> Object:
        """Return an object of this kind as a Job, with what decides about its outcome."""
        status = found.get("status") or {}
        conditions = [
            each | {"type": "Complete" if each["type"] == "Succeeded" else each["type"]}
            for each in status.get("conditions") or []
        ]
        return {
            "kind": self.kind,
            "metadata": found["metadata"],
            "spec": self._spec(found),
            "status": {"conditions": conditions},
        }

    def _spec(self, found: Object) -> Object:
        spec: Object = found["spec"]
        return spec

    def _pods(self, job: Object, node_0: str, *env: Object) -> Object:
        """Return the pod template of a Job for an operator. node_0: the host name of node 0. env: more variables."""
        template: Object = deepcopy(job["spec"]["template"])
        del template["spec"]["subdomain"]  # of our Service
        container = next(each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
        container["name"] = self.container
        container["env"] = [
            *({**each, "value": node_0} if each["name"] == NODE_0 else each for each in container["env"]),
            *env,
        ]
        return template


class PyTorchJob(IndexedJob):
    """A PyTorchJob of workers alone: beside a Master each worker gets a container that `restricted` refuses."""

    name = "pytorchjob"
    api = "kubeflow.org/v1"
    plurals = ("pytorchjobs",)
    kind = "PyTorchJob"
    container = "pytorch"
    operator = "Kubeflow Training Operator 1.9"
    component = "training-operator"

    def objects(self, job: Object) -> list[tuple[str, Object]]:
        """Return the PyTorchJob, whose label gives each pod its number; its variables are for groups with a Master."""
        name, spec = job["metadata"]["name"], job["spec"]
        number = {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{REPLICA_LABEL}']"}}}
        worker = {
            "replicas": spec["completions"],
            "restartPolicy": "Never",
            "template": self._pods(job, f"{name}-worker-0", number),
        }
        kept = {key: spec[key] for key in ("ttlSecondsAfterFinished",) if key in spec}
        # Without this policy the other pods would run on after a failure.
        made = {"runPolicy": {"cleanPodPolicy": "Running", **kept}, "pytorchReplicaSpecs": {"Worker": worker}}
        return [(self.paths[0], _object(self, self.kind, job, made))]

    def refused_at(self, name: str) -> list[Place]:
        """Return where the Training Operator says it."""
        return [("PyTorchJob", name, "FailedCreatePod")]

    def _spec(self, found: Object) -> Object:
        spec = found["spec"]
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
    component = "trainer"
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

    def refused_at(self, name: str) -> list[Place]:
        """Return where JobSet's Job, or Trainer, says it."""
        return [("Job", f"{name}-node-0", "FailedCreate"), ("TrainJob", name, "TrainJobResourcesCreationFailed")]

    def _spec(self, found: Object) -> Object:
        said = (found["metadata"].get("annotations") or {}).get(NODES, "")
        nodes = int(said) if re.fullmatch("[0-9]{1,9}", said) else 1
        return {"completions": nodes, "suspend": found["spec"].get("suspend")}


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
    versions = [each["version"] for each in _found(api, f"/apis/{group}").get("versions") or []]
    served = {each["name"] for each in _found(api, f"/apis/{kind.api}").get("resources") or []}
    lacks = [plural for plural in kind.plurals if plural not in served]
    if lacks:
        which = f"serves {group} in {', '.join(versions)}" if versions else f"does not serve {group}"
        raise VlmflowError(
            f"cluster.multi_node is {kind.name}: the cluster {which}, and has no {' and '.join(lacks)} of {version}",
            f"let an administrator install {kind.operator}, or set cluster.multi_node: {INDEXED_JOB.name}",
        )


def _found(api: Api, path: str) -> Any:
    try:
        return api.call("GET", path)
    except Refused as refused:
        if refused.status != 404:
            raise
        return {}


def _object(kind: IndexedJob, name: str, job: Object, spec: Object) -> Object:
    metadata = {key: job["metadata"][key] for key in ("name", "labels", "annotations") if key in job["metadata"]}
    return {"apiVersion": kind.api, "kind": name, "metadata": deepcopy(metadata), "spec": spec}
