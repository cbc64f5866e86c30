"""Operators that run a group of pods for one object: the Training Operator (PyTorchJob), and Trainer (TrainJob).

Each runs as its project deploys it: with its own manifests, service account, rights, webhooks and certificates. Only
what those manifests take from a registry differs: the image is made here, of the one static program.
"""

import json
import shutil
from pathlib import Path

import yaml

from cluster import image_store
from cluster.binaries import binary, upstream
from cluster.cluster import Cluster
from cluster.paths import STATE
from cluster.shell import run, wait_for

POD = {"spec": {"containers": [{"name": "pytorch", "image": "none"}]}}
PYTORCHJOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "asked"},
    "spec": {"pytorchReplicaSpecs": {"Worker": {"template": POD}}},
}
REPLICATED = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": POD}}}]}
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "asked"},
    "spec": REPLICATED,
}
RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainingRuntime",
    "metadata": {"name": "asked"},
    "spec": {"template": {"spec": REPLICATED}},
}


def start_training_operator(cluster: Cluster) -> None:
    """Let the cluster run PyTorchJobs, if it cannot yet."""
    manifests = upstream("training-operator") / "manifests"
    _start(cluster, "training-operator", manifests / "overlays" / "standalone", PYTORCHJOB)


def start_trainer(cluster: Cluster) -> None:
    """Let the cluster run JobSets and TrainJobs, if it cannot yet."""
    _start(cluster, "jobset", upstream("jobset") / "config" / "default", JOBSET)
    manifests = STATE / "trainer-manifests"
    shutil.copytree(upstream("trainer") / "manifests", manifests, dirs_exist_ok=True)
    file = manifests / "overlays" / "manager" / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    kustomization["resources"].remove("../../third-party/jobset")  # JobSet is there; this would download it
    file.write_text(yaml.safe_dump(kustomization))
    _start(cluster, "trainer", file.parent, RUNTIME)


STARTS = {"training-operator": start_training_operator, "trainer": start_trainer}


def _start(cluster: Cluster, name: str, manifests: Path, accepted: dict) -> None:
    """Apply an operator's manifests, with its program as the image, and wait until its webhook answers.

    manifests: a kustomization; accepted: an object of the operator's that its webhook accepts.
    """
    started = STATE / f"started-{name}"
    if started.exists():
        return
    image = f"localhost/vlmflow/{name}:{binary(name).parent.name.rpartition('-')[2]}"
    image_store.carry_in(cluster.node, image_store.program_archive(image, binary(name)))
    objects = list(yaml.safe_load_all(run(binary("kubectl"), "kustomize", manifests)))
    deployment = next(one for one in objects if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": cluster.node.name}  # the other node comes and goes
    container = pod["containers"][0]
    container |= {"image": image, "imagePullPolicy": "Never", "resources": {}}
    container.pop("command", None)  # /manager; this image's entry point is the program
    container["readinessProbe"] |= {"initialDelaySeconds": 0, "periodSeconds": 1}
    # By the server, because kubectl's own way copies each object into an annotation, and the CRDs are too long for one.
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.kubectl("apply", "--server-side", "--filename=-", input=listed)
    where = f"--namespace={deployment['metadata']['namespace']}"
    cluster.kubectl("rollout", "status", f"deployment/{deployment['metadata']['name']}", where, "--timeout=120s")

    def answers() -> bool:
        """Say whether the webhook does: for a moment after the pod is ready, kube-proxy does not know its address."""
        cluster.kubectl("create", "--dry-run=server", "--filename=-", input=json.dumps(accepted))
        return True

    wait_for(f"the webhook of {name} answers", answers)
    started.touch()
