"""The demo with `nodes: 2` as a PyTorchJob and as a TrainJob: each operator as its project deploys it, none deleted."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.cluster_workflow import STEPS, TWO_NODES, ClusterWorkflow, steps
from cluster.deployment import rendered, with_component
from cluster.operators import start_trainer, start_training_operator
from cluster.shell import wait_for
from vlmflow.core.files import sha256_of
from vlmflow.remote.cluster.groups import PYTORCHJOB, TRAINJOB, IndexedJob
from workflow_runs import RUN

pytestmark = pytest.mark.slow

OWNERS = {"pytorchjob": ["PyTorchJob"], "trainjob": ["Job"]}
MADE = {"pytorchjob": ["pytorchjobs"], "trainjob": ["trainjobs", "trainingruntimes", "jobsets"]}
"""The kind of the object that owns a pod; what must be gone at the end, beside Jobs and Services."""


@dataclass(frozen=True)
class Training:
    """A training that ended; kind: of its group."""

    kind: IndexedJob
    pods: list[dict]


@pytest.fixture(
    scope="module",
    params=[(PYTORCHJOB, start_training_operator), (TRAINJOB, start_trainer)],
    ids=lambda param: param[0].name,
)
def training(
    request: pytest.FixtureRequest, project: ClusterWorkflow, tmp_path_factory: pytest.TempPathFactory
) -> Training:
    """Train in two pods, by the controller's account with the component of a kind."""
    kind: IndexedJob
    start: Callable[[Cluster], None]
    kind, start = request.param
    start_dns(project.cluster)
    start(project.cluster)
    objects = rendered(with_component(tmp_path_factory.mktemp("k8s") / "k8s", "local", kind.component))
    role = next(one for one in objects if one["kind"] == "Role")
    role["metadata"]["namespace"] = project.namespace
    project.cluster.apply(role)
    for done in (project.targets / "checkpoints" / RUN, project.volumes / "outputs" / "runs" / RUN):
        shutil.rmtree(done, ignore_errors=True)
    project.forget_pods()
    config = [TWO_NODES, f"cluster={{multi_node: {kind.name}}}"]
    project.run(*project.words("--config", *config, targets=[f"checkpoints/{RUN}/full"]))
    return Training(kind, project.rules()["train_model"])


def test_the_operator_made_the_pods_each_on_a_node_of_its_own(training: Training, project: ClusterWorkflow) -> None:
    # As a TrainJob was deleted, its pods were once made again for a moment, and got no node.
    placed = [pod for pod in training.pods if "nodeName" in pod["spec"]]
    owners = [owner["kind"] for pod in placed for owner in pod["metadata"]["ownerReferences"]]
    assert owners == OWNERS[training.kind.name] * 2
    nodes = {pod["spec"]["nodeName"] for pod in placed}
    assert nodes == {project.cluster.node.name, project.cluster.second_node.name}
    assert {pod["spec"]["containers"][0]["name"] for pod in training.pods} == {training.kind.container}
    smoke = [pod for pod in project.rules()["train_smoke"] if "vlmflow/group" in pod["metadata"]["labels"]]
    assert len(smoke) == 2, "the smoke run is a group, too"


def test_the_weights_are_those_of_one_node(training: Training, project: ClusterWorkflow, here: Path) -> None:
    assert steps(project) == list(range(1, STEPS + 1))
    there = project.targets / "checkpoints" / RUN / "full" / "adapter_model.safetensors"
    assert sha256_of(there) == sha256_of(here / there.name)


def test_nothing_is_left(training: Training, project: ClusterWorkflow) -> None:
    def everything() -> list[str]:
        kinds = ["pods", "jobs", "services", *MADE[training.kind.name]]
        found = [one for kind in kinds for one in project.cluster.get(kind, namespace=project.namespace)["items"]]
        return [one["metadata"]["name"] for one in found if not one["metadata"]["name"].startswith("controller")]

    wait_for("everything goes", lambda: everything() == [], 60)
    assert list((project.volumes / "outputs" / "runs").rglob("launch-*")) == []
