"""What a real cluster does to jobs and controllers, made for real: each fault ends in a retry or in one clear error."""

import time
from collections.abc import Iterator

import pytest

from cluster.cluster import Cluster
from cluster.fault_road import NAMESPACE, Call, FaultRoad, fault_road
from cluster.images import project_image
from cluster.locks import alone
from cluster.shell import wait_for

AWAY_SECONDS = 120
TARGETS = ("deleted", "evicted", "healthy", "hungry", "glutton", "full", "unpulled", "refused", "four_gpus")
FAILED = {"glutton", "full", "unpulled", "refused"}


@pytest.fixture(scope="module")
def road(cluster: Cluster) -> Iterator[FaultRoad]:
    with fault_road(cluster) as road:
        yield road


@pytest.fixture(scope="module")
def storm(road: FaultRoad) -> Call:
    """All faults in one call: a Job deleted, a pod evicted, too few GPUs, an API server that is away for minutes."""
    node = road.cluster.node.name
    road.cluster.set_capacity(node, {"nvidia.com/gpu": "2"})
    call = road.call("storm", *(f"{name}.txt" for name in TARGETS))
    deleted = road.running("deleted")
    road.cluster.kubectl(
        f"--namespace={NAMESPACE}", "delete", "job", deleted["metadata"]["labels"]["job-name"], "--wait=false"
    )
    road.evict(road.running("evicted"))
    call.wait_for("four_gpus has waited", 120)
    road.cluster.set_capacity(node, {"nvidia.com/gpu": "4"})
    call.wait_for("healthy: step 1/2")
    with alone("cluster"):  # to others it looks like a cluster that a killed run left
        road.cluster.stop("kube-apiserver")
        time.sleep(AWAY_SECONDS)
        road.cluster.start("kube-apiserver")
    assert call.end(400) == 1, call.said[-4000:]
    return call


def errors_of(call: Call, rule: str) -> list[str]:
    """Give the error reports of a rule, each with the lines that follow it."""
    return [part[:3000] for part in call.said.split("Error in rule ")[1:] if part.startswith(f"{rule}:")]


def test_all_that_can_end_well_does(storm: Call, road: FaultRoad) -> None:
    made = {name for name in TARGETS if (road.targets / f"{name}.txt").exists()}
    assert made == set(TARGETS) - FAILED
    assert errors_of(storm, "healthy") == []


def test_nothing_is_left_behind(storm: Call, road: FaultRoad) -> None:
    # What has ended goes when the cluster's controllers have seen that the API server is there again.
    wait_for("the pods of finished Jobs go", lambda: not road.left(), 180)
    assert list((road.folder.parent / ".pods").iterdir()) == []


def test_a_deleted_job_is_tried_again(storm: Call) -> None:
    assert len(errors_of(storm, "deleted")) == 1
    assert "its Job was deleted" in errors_of(storm, "deleted")[0]


def test_an_evicted_pod_is_tried_again(storm: Call) -> None:
    assert len(errors_of(storm, "evicted")) == 1
    assert "evicted" in errors_of(storm, "evicted")[0].partition("message: evicted: ")[2].splitlines()[0]


def test_out_of_memory_gets_more_of_it(storm: Call) -> None:
    reports = errors_of(storm, "hungry")
    assert 1 <= len(reports) <= 2
    assert "(400 MB); the next attempt gets 600 MB" in reports[0]


def test_out_of_memory_at_the_limit_is_one_error(storm: Call) -> None:
    reports = errors_of(storm, "glutton")
    assert len(reports) == 2
    assert "(800 MB); the next attempt gets 1000 MB" in reports[0]
    assert "cluster.max_mem_mb allows no more" in reports[1]


def test_a_full_disk_is_one_error(storm: Call) -> None:
    reports = errors_of(storm, "full")
    assert len(reports) == 1
    assert "give the rule a larger disk_mb" in reports[0]


def test_an_image_that_cannot_be_pulled_is_explained_and_is_one_error(storm: Call) -> None:
    assert "unpulled has waited" in storm.said
    reports = errors_of(storm, "unpulled")
    assert len(reports) == 1
    assert "image none.invalid/vlmflow/data:0 cannot be pulled" in reports[0]


def test_a_template_that_is_not_there_is_one_error(storm: Call) -> None:
    reports = errors_of(storm, "refused")
    assert len(reports) == 1
    assert "pod_template is 'nowhere'" in reports[0]


def test_too_few_gpus_are_explained(storm: Call) -> None:
    assert "nvidia.com/gpu: 4 asked, the largest node has 2: 2 short" in storm.said


def test_an_api_server_that_is_away_is_waited_for(storm: Call) -> None:
    assert "The API server does not do its work" in storm.said
    assert "The API server answers again" in storm.said


def test_progress_is_shown(storm: Call) -> None:
    assert "healthy: step 1/2 · loss 1.000" in storm.said


def begins(road: FaultRoad, pod: dict) -> str:
    """Wait until the counting in a pod has begun, and give what it said."""
    name = pod["metadata"]["name"]

    def said() -> str:
        lines = road.cluster.kubectl(f"--namespace={NAMESPACE}", "logs", name).splitlines()
        return next((line for line in lines if line.startswith("begins at")), "")

    return wait_for("the counting begins", said, 60, pause=0.5)


def stop(road: FaultRoad, call: Call, signal: str, lost: tuple[str, ...] = ()) -> None:
    call.signal(signal)
    assert call.end(60) == 1
    assert "Stopping. Ending 1 Job(s), whose pods save their work first: counts." in call.said
    assert road.left() == list(lost)


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
        # The API keeps a lost node's pod until the node is deleted; all else is gone.
        stop(road, call, "TERM", lost=(pod["metadata"]["name"],))
    finally:
        cluster.kubectl("uncordon", cluster.node.name)
        cluster.remove_node()
