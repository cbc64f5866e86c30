"""The cluster for the tests of this folder: the machine's own, or that of KUBECONFIG."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import everything, machine
from cluster.cluster import Cluster
from cluster.cluster_road import ClusterRoad
from cluster.deployment import deployed
from cluster.images import project_image
from cluster.kubectl import Kubectl
from cluster.paths import KUBECONFIG, STATE
from roads import RUN, copy_folder, make_demo_folder, snakemake


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep for the end the tests that take the cluster down: what others put on it is gone then."""
    items.sort(key=lambda item: item.path.name == "test_left_clean.py")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Give the tests' own cluster, for tests that stop parts of it; one that ran before is left running."""
    if reason := machine.why_not():
        # Where CI decides over a change, a cluster that is not tested is a failure.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    everything.build()
    own = Cluster()
    ran_before = own.running()
    own.up()
    yield own
    if ran_before:
        own.up()  # test_left_clean.py took it down
    else:
        own.down()


@pytest.fixture(scope="session")
def any_cluster(request: pytest.FixtureRequest) -> Kubectl:
    """Give the cluster of KUBECONFIG, or the tests' own where that is not set."""
    given = os.environ.get("KUBECONFIG")
    if given and Path(given) != KUBECONFIG:
        return Kubectl(Path(given))
    return request.getfixturevalue("cluster")


@pytest.fixture(scope="session")
def fresh_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a demo folder in which nothing has run."""
    return make_demo_folder(tmp_path_factory.mktemp("demo") / "fresh")


@pytest.fixture(scope="session")
def demo(fresh_demo: Path) -> Path:
    """Give a demo folder in which the road was walked on this machine."""
    folder = copy_folder(fresh_demo, fresh_demo.with_name("walked"))
    snakemake(folder, "--max-threads", "1", f"merged/{RUN}")
    return folder


@pytest.fixture(scope="session")
def project(cluster: Cluster, fresh_demo: Path) -> Iterator[ClusterRoad]:
    """Give the project on the cluster, with the demo's sample and model on its cache volume."""
    cluster.add_node()  # pods that ask for a core each run side by side
    for target in ("data", "train"):
        cluster.carry_in(project_image(target))
    volumes = STATE / "volumes" / "vlmflow"
    with deployed(cluster, "vlmflow", volumes):
        road = ClusterRoad(cluster, "vlmflow", volumes)
        road.bring(fresh_demo)
        cluster.kubectl("--namespace=vlmflow", "rollout", "status", "deployment/controller", "--timeout=120s")
        yield road
