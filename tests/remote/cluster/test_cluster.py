"""The tests' cluster is real: jobs, two nodes, DNS, GPUs that a node reports, parts that stop and restart."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import addons, images, jobs
from cluster.cluster import Cluster
from cluster.kubectl import a_namespace
from cluster.node import Node
from cluster.paths import MACHINE_ADDRESS
from cluster.shell import wait_for
from vlmflow.core.errors import VlmflowError

NAMESPACE = "cluster-tests"
IMAGE = images.image_name("data")


@pytest.fixture(scope="module", autouse=True)
def namespace(cluster: Cluster) -> Iterator[None]:
    cluster.carry_in(images.project_image("data"))
    with cluster.having(a_namespace(NAMESPACE)):
        wait_for("a service account", lambda: cluster.get("serviceaccount", "default", NAMESPACE))
        yield


@pytest.fixture
def second_node(cluster: Cluster) -> Iterator[Node]:
    """Return a second node, gone after the test if it was not there before."""
    there = cluster.second_node.running()
    node = cluster.add_node()
    cluster.carry_in(images.project_image("data"))
    yield node
    if not there:
        cluster.remove_node()


def conditions(cluster: Cluster, pod: str) -> dict[str, str]:
    status = cluster.get("pod", pod, NAMESPACE)["status"]
    return {each["type"]: each.get("message", "") for each in status.get("conditions", ())}


def test_it_starts_in_ten_seconds_and_has_the_pinned_version(cluster: Cluster) -> None:
    begun = time.monotonic()
    cluster.up()
    assert time.monotonic() - begun < 10
    assert cluster.get("node", "node-a")["status"]["nodeInfo"]["kubeletVersion"] == "v1.34.4"


def test_a_job_runs_as_the_images_user_within_the_restricted_standard(cluster: Cluster) -> None:
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    said = jobs.run(cluster, jobs.job("who", ["id", "--user"], IMAGE), NAMESPACE)
    assert said == "1000\n"


def test_a_failed_job_is_reported_with_its_log(cluster: Cluster) -> None:
    with pytest.raises(VlmflowError, match="no such luck"):
        jobs.run(cluster, jobs.job("fails", ["sh", "-c", "echo no such luck; exit 3"], IMAGE), NAMESPACE)


def test_memory_over_the_limit_is_killed(cluster: Cluster) -> None:
    # A child, as in a rule's pod: if process 1 is killed, its end may be reported before the reason.
    command = "python -c \"b = b'x' * 300_000_000\"; code=$?; sleep 1; exit $code"
    hog = jobs.job("hog", ["sh", "-c", command], IMAGE, {"memory": "64Mi"})
    with pytest.raises(VlmflowError, match="OOMKilled"):
        jobs.run(cluster, hog, NAMESPACE)


def test_a_volume_is_shared_by_nodes(cluster: Cluster, second_node: Node, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    volume, claim = jobs.shared_volume("shared", tmp_path / "shared", NAMESPACE)
    with cluster.having(volume):
        cluster.apply(claim)
        # A pod that names its node bypasses the scheduler, which would have waited for the claim.
        wait_for("the claim is bound", lambda: cluster.get("pvc", "shared", NAMESPACE)["status"]["phase"] == "Bound")
        for node in ("node-a", "node-b"):
            line = jobs.job(f"on-{node}", ["sh", "-c", f"echo {node} >> /shared/lines"], IMAGE, nodeName=node)
            jobs.run(cluster, jobs.with_volume(line, "shared", "/shared"), NAMESPACE)
    assert (tmp_path / "shared" / "lines").read_text() == "node-a\nnode-b\n"


def test_a_pod_reaches_a_service_by_its_name_on_another_node_and_nothing_outside(
    cluster: Cluster, second_node: Node
) -> None:
    addons.start_dns(cluster)
    server = jobs.job("server", ["python", "-m", "http.server", "8000", "--directory", "/opt/vlmflow"], IMAGE)
    server["spec"]["template"]["metadata"] = {"labels": {"app": "server"}}
    server["spec"]["template"]["spec"]["nodeName"] = "node-b"
    service = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]}
    meta = {"name": "server", "namespace": NAMESPACE}
    cluster.apply([server, {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service}], NAMESPACE)
    code = """
import time, urllib.request
end = time.monotonic() + 90
while True:
    try:
        print(urllib.request.urlopen("http://server/", timeout=2).status)
        break
    except OSError:
        if time.monotonic() > end:
            raise
        time.sleep(0.2)
try:
    urllib.request.urlopen("http://192.0.2.1/", timeout=5)
except OSError as error:
    print("outside:", error.reason)
"""
    client = jobs.job("client", ["python", "-c", code], IMAGE, nodeName="node-a")
    said = jobs.run(cluster, client, NAMESPACE)
    assert said.splitlines()[0] == "200"
    assert "outside:" in said.splitlines()[1]
    assert "timed out" not in said, "packets left the node"


def test_pods_are_placed_by_the_gpus_that_a_node_reports(cluster: Cluster) -> None:
    cluster.set_capacity("node-a", {"nvidia.com/gpu": "2"})
    too_many = jobs.job("too-many", ["true"], IMAGE, {"nvidia.com/gpu": "4"})
    # The scheduler may see the change before the kubelet, which then rejects the pod (OutOfnvidia.com/gpu).
    too_many["spec"]["backoffLimit"] = 3
    cluster.apply(too_many, NAMESPACE)
    pod = jobs.pod_of(cluster, "too-many", NAMESPACE)["metadata"]["name"]
    why = wait_for("it is refused", lambda: conditions(cluster, pod).get("PodScheduled"))
    assert "Insufficient nvidia.com/gpu" in why
    cluster.set_capacity("node-a", {"nvidia.com/gpu": "4"})
    wait_for("it ends", lambda: cluster.get("job", "too-many", NAMESPACE)["status"].get("succeeded"), 120)
    cluster.set_capacity("node-a", {"nvidia.com/gpu": "0"})


def test_fake_nodes_take_pods_by_product_and_taint(cluster: Cluster) -> None:
    addons.start_fake_nodes(cluster)
    taint = {"key": "reserved", "value": "ours", "effect": "NoSchedule"}
    names = [f"fake-{number}" for number in range(4)]
    for number, name in enumerate(names):
        product = {"nvidia.com/gpu.product": "A100" if number % 2 else "L40"}
        cluster.apply(addons.fake_node(name, {"nvidia.com/gpu": "8"}, product, [taint] if number == 3 else []))
    try:
        made = jobs.job("a100", ["true"], IMAGE, {"nvidia.com/gpu": "8"})
        made["spec"]["template"]["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "A100"}
        cluster.apply(made, NAMESPACE)
        placed = wait_for("placed", lambda: jobs.pod_of(cluster, "a100", NAMESPACE)["spec"].get("nodeName"))
        assert placed == "fake-1"
        wait_for("done", lambda: jobs.pod_of(cluster, "a100", NAMESPACE)["status"]["phase"] == "Succeeded")
    finally:
        cluster.kubectl("delete", "nodes", *names)


def test_the_api_server_keeps_its_objects_over_a_restart(cluster: Cluster) -> None:
    cluster.stop("kube-apiserver")
    with pytest.raises(VlmflowError, match=r"refused|connect"):
        cluster.get("nodes")
    cluster.start("kube-apiserver")
    assert cluster.get("namespace", NAMESPACE)["status"]["phase"] == "Active"


def test_the_machine_is_reached_from_pods_at_one_address(cluster: Cluster) -> None:
    code = f"import socket; socket.create_connection(('{MACHINE_ADDRESS}', 9), timeout=5)"
    with pytest.raises(VlmflowError, match="ConnectionRefusedError"):
        jobs.run(cluster, jobs.job("machine", ["python", "-c", code], IMAGE), NAMESPACE)
