"""The cluster for the tests of this folder: the machine's own, or that of KUBECONFIG."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import session_folder
import warm_programs
from cluster import everything, machine
from cluster.cluster import Cluster
from cluster.cluster_workflow import THREADS, TOKEN, ClusterWorkflow
from cluster.deployment import deployed_on_first_node
from cluster.kubectl import Kubectl
from cluster.nodes_workflow import ONE_NODE
from cluster.paths import KUBECONFIG, STATE
from workflow_runs import RUN, checkout, copy_folder, make_demo_folder, snakemake


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of faults first, which leave room for the local run, and those that stop the cluster last."""
    order = {"test_executor.py": -1, "test_left_clean.py": 1}
    items.sort(key=lambda item: order.get(item.path.name, 0))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the tests' own cluster, for tests that stop parts of it; one that ran before is left running."""
    if reason := machine.why_not():
        # In CI, an untested cluster is a failure.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    everything.build()
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
def fresh_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a demo folder in which nothing has run."""
    return make_demo_folder(tmp_path_factory.mktemp("demo") / "fresh")


@pytest.fixture(scope="session")
def local_runs(fresh_demo: Path) -> tuple[Path, Path]:
    """Run on this machine what other tests run on the cluster; returns the folders of `demo` and `here`."""
    folder = session_folder.folder()
    server = warm_programs.start(folder, Path(sys.executable))
    try:
        warm_programs.wait_for(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLMFLOW_WARM", str(folder))
            patch.setenv("PYTHONPATH", str(warm_programs.HANDING_OVER))
            demo = copy_folder(fresh_demo, fresh_demo.with_name("walked"))
            snakemake(demo, *THREADS, "--", f"merged/{RUN}")  # the number of threads changes the last bits of a sum
            here = copy_folder(demo, fresh_demo.with_name("here"))
            only = ["--allowed-rules", "train_model", "--forcerun", "train_model"]
            snakemake(here, "--config", ONE_NODE, *only, "--", f"checkpoints/{RUN}/full")
    finally:
        server.terminate()
        server.wait()
    return demo, here


@pytest.fixture(scope="session")
def demo(local_runs: tuple[Path, Path]) -> Path:
    """Return a demo folder in which the workflow ran on this machine."""
    return local_runs[0]


@pytest.fixture(scope="session")
def here(local_runs: tuple[Path, Path]) -> Path:
    """Return the full checkpoint of nodes_workflow's training on this machine: one node, two processes, no break."""
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
