"""What a real cluster does to jobs, made for real, all in one call of Snakemake: each ends in a retry or one error."""

import time
from collections.abc import Iterator

import pytest

from cluster.cluster import Cluster
from cluster.fault_road import Call, FaultRoad, fault_road

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
        "--namespace=vlmflow-faults", "delete", "job", deleted["metadata"]["labels"]["job-name"], "--wait=false"
    )
    road.evict(road.running("evicted"))
    call.wait_for("four_gpus has waited", 120)
    road.cluster.set_capacity(node, {"nvidia.com/gpu": "4"})
    road.running("healthy")
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
    assert road.left() == []
    assert list((road.folder.parent / ".pods").iterdir()) == []


def test_a_deleted_job_is_tried_again(storm: Call) -> None:
    assert len(errors_of(storm, "deleted")) == 1
    assert "its Job was deleted" in errors_of(storm, "deleted")[0]


def test_an_evicted_pod_is_tried_again(storm: Call) -> None:
    assert len(errors_of(storm, "evicted")) == 1
    assert "evicted (a drained node, or by hand)" in errors_of(storm, "evicted")[0]


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
    assert "four_gpus runs now." in storm.said


def test_an_api_server_that_is_away_is_waited_for(storm: Call) -> None:
    assert "The API server does not do its work" in storm.said
    assert "The API server answers again" in storm.said


def test_progress_is_shown(storm: Call) -> None:
    assert "healthy: step 1/2 · loss 1.000" in storm.said
