"""The cluster for the tests of this folder: the machine's own, or that of KUBECONFIG."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import images, machine
from cluster.cluster import Cluster
from cluster.cluster_workflow import TOKEN, ClusterWorkflow
from cluster.deployment import deployed_on_first_node
from cluster.kubectl import Kubectl
from cluster.paths import KUBECONFIG, STATE
from debian import lacking
from workflow_runs import RUN, checkout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of faults first, which leave room for the local run, and those that stop the cluster last."""
    order = {"test_executor.py": 1, "test_left_clean.py": 3}
    items.sort(key=lambda item: order.get(item.path.name, 2) if item.path.parent == Path(__file__).parent else 0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the tests' own cluster, for tests that stop parts of it; one that ran before is left running."""
    if reason := machine.why_not():
        lacking(reason)
    images.build_all()
    own = Cluster()
    ran_before = own.running()
    own.up()
    yield own
    if ran_before:
        own.up()  # test_left_clean.py stopped it
    else:
        own.down()


@pytest.fixture(scope="session")
def any_cluster(request: pytest.FixtureRequest) -> Kubectl:
    """Return the cluster of KUBECONFIG, or the tests' own if that is not set."""
    given = os.environ.get("KUBECONFIG")
    if given and Path(given) != KUBECONFIG:
        return Kubectl(Path(given))
    return request.getfixturevalue("cluster")


@pytest.fixture(scope="session")
def demo(local_runs: tuple[Path, Path]) -> Path:
    """Return a demo folder in which the workflow ran on this machine."""
    return local_runs[0]


@pytest.fixture(scope="session")
def here(local_runs: tuple[Path, Path]) -> Path:
    """Return the full checkpoint of ONE_NODE's training on this machine: one node, two processes, no break."""
    return local_runs[1] / "checkpoints" / RUN / "full"


@pytest.fixture(scope="session")
def project(cluster: Cluster, fresh_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterWorkflow]:
    """Return the project on the cluster, with the demo's sample and model on its cache volume."""
    volumes = STATE / "volumes" / "vlmflow"
    with deployed_on_first_node(cluster, "vlmflow", volumes, images=["data", "train"]):
        workflow = ClusterWorkflow(
            cluster, "vlmflow", volumes, checkout(tmp_path_factory.mktemp("person") / "checkout")
        )
        workflow.bring(fresh_demo)
        yield workflow


@pytest.fixture(scope="session")
def finished(project: ClusterWorkflow) -> ClusterWorkflow:
    """Return the project on the cluster after the whole demo, from raw rows to merged weights."""
    (project.checkout / ".env").write_text(f"HF_TOKEN={TOKEN}\n")
    subprocess.run(project.ask("token"), env=project.environment, check=True)
    # Four virtual GPUs: the pods are placed by them, and train on the CPU.
    project.cluster.set_capacity(project.cluster.second_node.name, {"nvidia.com/gpu": "4"})
    gpus = ["--set-resources", "train_model:gpu=4", "train_model:pod_template=gpu"]
    (STATE / "said.txt").write_text(project.run(*project.words(*gpus)))
    return project
