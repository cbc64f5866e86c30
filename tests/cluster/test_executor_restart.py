"""The controller is interrupted, killed, and comes back; a node is lost."""

from collections.abc import Iterator

import pytest

from cluster.cluster import Cluster
from cluster.fault_road import NAMESPACE, Call, FaultRoad, fault_road
from cluster.images import project_image
from cluster.shell import wait_for


@pytest.fixture(scope="module")
def road(cluster: Cluster) -> Iterator[FaultRoad]:
    with fault_road(cluster) as road:
        yield road


def begins(road: FaultRoad, pod: dict) -> str:
    """Wait until the counting in a pod has begun, and give what it said."""
    name = pod["metadata"]["name"]

    def said() -> str:
        lines = road.cluster.kubectl(f"--namespace={NAMESPACE}", "logs", name).splitlines()
        return next((line for line in lines if line.startswith("begins at")), "")

    return wait_for("the counting begins", said, 60, pause=0.5)


def stop(road: FaultRoad, call: Call, signal: str) -> None:
    call.signal(signal)
    assert call.end(60) == 1
    assert "Stopping. Ending 1 Job(s), whose pods save their work first: counts." in call.said
    assert road.left() == []


def saved(road: FaultRoad) -> int:
    return int((road.folder / "saved").read_text())


def test_ctrl_c_saves_and_leaves_nothing(road: FaultRoad) -> None:
    call = road.call("interrupted", "counts.txt")
    assert begins(road, road.running("counts")).startswith("begins at 0 ")
    stop(road, call, "INT")
    assert saved(road) > 0


def test_a_stopped_controller_does_the_same(road: FaultRoad) -> None:
    before = saved(road)
    call = road.call("terminated", "counts.txt")
    assert begins(road, road.running("counts")).startswith(f"begins at {before} ")
    stop(road, call, "TERM")
    assert saved(road) > before


def test_after_a_kill_the_next_call_ends_the_old_job_and_goes_on(road: FaultRoad) -> None:
    before = saved(road)
    call = road.call("killed", "counts.txt")
    old = road.running("counts")
    begins(road, old)
    call.signal("KILL")
    assert call.end(30) != 0
    assert [pod["metadata"]["name"] for pod in road.pods("counts")] == [old["metadata"]["name"]]
    again = road.call("again", "counts.txt")
    again.wait_for("An earlier call left work behind. Ending 1 Job(s)", 30)

    def new() -> list[dict]:
        return [pod for pod in road.pods("counts") if pod["metadata"]["name"] != old["metadata"]["name"]]

    pod = wait_for("another pod runs", new, 90, pause=0.5)[0]
    kept = saved(road)
    assert kept > before
    assert begins(road, pod).startswith(f"begins at {kept} ")
    stop(road, again, "TERM")


def test_a_lost_nodes_job_runs_on_another(road: FaultRoad, cluster: Cluster) -> None:
    second = cluster.add_node()
    try:
        cluster.kubectl("cordon", cluster.node.name)
        cluster.carry_in(project_image("data"))
        call = road.call("lost", "counts.txt")
        pod = road.running("counts")
        assert pod["spec"]["nodeName"] == second.name
        begins(road, pod)
        cluster.kubectl("uncordon", cluster.node.name)
        second.kill()
        call.wait_for("Trying to restart job", 180)
        assert "taken off its node, which does not answer" in call.said
        assert road.running("counts")["spec"]["nodeName"] == cluster.node.name
        stop(road, call, "TERM")
    finally:
        cluster.kubectl("uncordon", cluster.node.name)
        cluster.remove_node()
