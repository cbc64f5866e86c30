"""Real faults of a cluster, for jobs and controllers: each ends in a retry or in one clear error."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cluster import Cluster
from cluster.fault_workflow import NAMESPACE, Call, FaultWorkflow, fault_workflow
from cluster.shell import alone, wait_for

AWAY_SECONDS = 75
FAILED = {"glutton", "full", "unpulled", "refused", "closed"}
TAKEN = ("stranded", "deleted", "evicted", "preempted")
HEALED = (*TAKEN, "suspended", "vanished", "hungry", "healthy", "four_gpus")
TARGETS = (*HEALED, *sorted(FAILED))


@pytest.fixture(scope="module")
def workflow(cluster: Cluster) -> Iterator[FaultWorkflow]:
    with fault_workflow(cluster) as workflow:
        yield workflow


@pytest.fixture(scope="module")
def storm(workflow: FaultWorkflow, request: pytest.FixtureRequest) -> Call:
    """All faults in one call: a Job deleted, a pod evicted or preempted, a kubelet stopped, an API server away."""
    node, second = workflow.cluster.node.name, workflow.cluster.second_node
    workflow.cluster.set_capacity(node, {"nvidia.com/gpu": "2"})
    call = workflow.call("storm", *(f"{name}.txt" for name in TARGETS))
    assert workflow.begun("stranded")["spec"]["nodeName"] == second.name
    second.stop_kubelet()  # its pods continue, unseen
    deleted = workflow.begun("deleted")
    workflow.cluster.kubectl(
        f"--namespace={NAMESPACE}", "delete", "job", deleted["metadata"]["labels"]["job-name"], "--wait=false"
    )
    workflow.evict(workflow.begun("evicted"))
    queued = workflow.begun("suspended")
    workflow.suspend(queued, True)
    workflow.begun("preempted")
    with workflow.urgent_pod(gpus=2):
        call.wait_for("four_gpus has waited")
        call.wait_for("removed from its node")
    workflow.suspend(queued, False)
    wait_for("another pod makes it elsewhere", (workflow.targets / "stranded.txt").exists, 180, pause=0.5)
    second.start_kubelet()  # it ends the rest of the first pod
    workflow.cluster.set_capacity(node, {"nvidia.com/gpu": "4"})
    call.wait_for("healthy: step 1/2")
    with alone("cluster"):  # otherwise it looks like the cluster of a killed run
        workflow.cluster.stop("kube-apiserver")
        back = time.monotonic() + AWAY_SECONDS
        (workflow.folder / "away").touch()
        vanished = workflow.targets / "vanished.txt"
        wait_for("a target that goes again", vanished.exists, 60, pause=0.5)
        vanished.unlink()
        request.getfixturevalue("demo")  # the local run that other tests compare with does not need the cluster
        time.sleep(max(0.0, back - time.monotonic()))
        workflow.cluster.start("kube-apiserver")
    assert call.end(600) == 1, call.said[-4000:]
    return call


def errors_of(call: Call, rule: str) -> list[str]:
    """Return the executor's error reports of a rule, each with the lines after it.

    They contain the end of a pod's log, which may have reports of the pod's own Snakemake.
    """
    parts = call.said.split("Error in rule ")[1:]
    return [part[:3000] for part in parts if part.startswith(f"{rule}:\n    message: {rule}: ")]


def test_all_that_can_end_well_does(storm: Call, workflow: FaultWorkflow) -> None:
    made = {name for name in TARGETS if (workflow.targets / f"{name}.txt").exists()}
    assert made == set(HEALED), storm.said[-12_000:]
    assert errors_of(storm, "healthy") == []


def test_nothing_is_left_behind(storm: Call, workflow: FaultWorkflow) -> None:
    # Ended objects disappear once the cluster's controllers see the API server again.
    wait_for("the pods of finished Jobs go", lambda: not workflow.left(), 180)
    assert list((workflow.folder.parent / ".pods").iterdir()) == []


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("deleted", "its Job was deleted"),
        ("evicted", "(its pod was removed: )?evicted"),  # no event says it, if no look saw the pod end
        ("preempted", "preempted by a pod of higher priority"),
        ("stranded", "removed from its node, which does not answer"),
    ],
)
def test_removed_jobs_are_created_again_and_use_up_no_retry(storm: Call, rule: str, why: str) -> None:
    """These rules have no retry."""
    assert errors_of(storm, rule) == []
    again = f"^{rule}: {why}.* Its Job is recreated in [345] s .disruption 1 of at most 20 in a row; this uses no retry"
    assert len(re.findall(again, storm.said, re.MULTILINE)) == 1, storm.said[-8_000:]


def test_a_suspended_job_waits_and_continues_in_another_pod(storm: Call) -> None:
    assert errors_of(storm, "suspended") == []
    assert not re.search("^suspended: .* Its Job is made again", storm.said, re.MULTILINE)


def test_a_failure_that_a_stage_reports_is_not_retried(storm: Call) -> None:
    reports = errors_of(storm, "closed")
    assert len(reports) == 1
    assert "ended with exit code 1" in reports[0]
    assert "This job is not retried: it would fail in the same way." in reports[0]
    assert "the stage failed: the gate of" in reports[0]


def test_a_missing_target_is_made_again(storm: Call) -> None:
    assert len(errors_of(storm, "vanished")) == 1
    words = "its pod succeeded, but /outputs/faults/targets/vanished.txt (missing in storage) after 5 s"
    assert words in errors_of(storm, "vanished")[0]


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


def test_an_image_that_cannot_be_pulled_is_one_error(storm: Call) -> None:
    reports = errors_of(storm, "unpulled")
    assert len(reports) == 1
    assert "image none.invalid/vlmflow/data:0 cannot be pulled" in reports[0]


def test_a_missing_template_is_one_error(storm: Call) -> None:
    reports = errors_of(storm, "refused")
    assert len(reports) == 1
    assert "pod_template is 'nowhere'" in reports[0]


def test_too_few_gpus_are_explained(storm: Call) -> None:
    assert "nvidia.com/gpu: 4 asked, the largest node has 2: 2 short" in storm.said


def test_an_api_server_that_is_away_is_waited_for(storm: Call) -> None:
    assert "The API server fails" in storm.said
    assert "The API server answers again" in storm.said


def test_progress_is_shown(storm: Call) -> None:
    assert "healthy: step 1/2 · loss 1.000" in storm.said


def test_two_groups_with_room_for_one_both_end(workflow: FaultWorkflow) -> None:
    """At first each has one of the first node's GPUs, and waits for one of the second node, which has none."""
    nodes = workflow.cluster.node, workflow.cluster.second_node
    for node, gpus in zip(nodes, ("2", "0"), strict=True):
        workflow.cluster.set_capacity(node.name, {"nvidia.com/gpu": gpus})
    call = workflow.call("groups", "group-a.txt", "group-b.txt")
    gave_up = r"^group run=(a|b): not all of its pods run after 8 s .cluster.gang_timeout.: pod 1 of 0 to 1: "
    wait_for("both give up", lambda: set(re.findall(gave_up, call.said, re.MULTILINE)) == {"a", "b"}, 120, pause=0.5)
    workflow.cluster.set_capacity(nodes[1].name, {"nvidia.com/gpu": "1"})
    assert call.end(300) == 0, call.said[-4000:]
    assert "Error in rule" not in call.said
    wait_for("nothing is left", lambda: not workflow.left(), 60)
    services = workflow.cluster.get("services", namespace=NAMESPACE, labels="vlmflow/group")["items"]
    assert services == []


def test_a_pod_killed_in_the_middle_of_its_store_leaves_no_half_target(workflow: FaultWorkflow) -> None:
    """Its local folder is on another disk than the targets, so that storing takes time."""
    target = workflow.targets / "bulky"
    call = workflow.call("bulky", "bulky", remote_job_local_storage_prefix="/scratch/pods")
    pod = workflow.running("bulky")

    def half() -> list[Path]:
        return list(workflow.targets.glob(".bulky.*.part/1"))

    wait_for("the store has begun", half, 120, pause=0.005)
    workflow.cluster.kill(pod)
    assert not target.exists()
    assert sum(file.stat().st_size for file in half()[0].parent.iterdir()) < 3 * 700 * 2**20
    assert call.end(240) == 0, call.said[-4000:]
    assert len(errors_of(call, "bulky")) == 1
    assert "ended with exit code 137 (signal 9)" in errors_of(call, "bulky")[0]
    assert {file.name: file.stat().st_size for file in target.glob("[0-9]")} == dict.fromkeys("123", 700 * 2**20)
    assert len(half()) == 1  # the killed pod's, which after a day does not count as live


def begins(workflow: FaultWorkflow, pod: dict) -> str:
    """Wait until the counting in a pod has begun, and return its output."""
    name = pod["metadata"]["name"]

    def said() -> str:
        lines = workflow.cluster.kubectl(f"--namespace={NAMESPACE}", "logs", name).splitlines()
        return next((line for line in lines if line.startswith("begins at")), "")

    return wait_for("the counting begins", said, 120, pause=0.5)


def stop(workflow: FaultWorkflow, call: Call, signal: str, lost: tuple[str, ...] = ()) -> None:
    call.signal(signal)
    assert call.end(120) == 1
    assert "Stopping. Ending 1 Job; their pods save their work first: counts." in call.said
    if lost:  # while one pod cannot be removed, other pods have ended, and nobody waits for their removal
        wait_for("all else goes", lambda: workflow.left() == list(lost))
    else:
        assert workflow.left() == []


def saved(workflow: FaultWorkflow) -> int:
    return int((workflow.folder / "saved").read_text())


def test_ctrl_c_saves_and_leaves_nothing(workflow: FaultWorkflow) -> None:
    call = workflow.call("interrupted", "counts.txt")
    assert begins(workflow, workflow.running("counts")).startswith("begins at 0 ")
    stop(workflow, call, "INT")
    assert saved(workflow) > 0


@pytest.mark.slow
def test_a_stopped_controller_does_the_same(workflow: FaultWorkflow) -> None:
    before = saved(workflow)
    call = workflow.call("terminated", "counts.txt")
    assert begins(workflow, workflow.running("counts")).startswith(f"begins at {before} ")
    stop(workflow, call, "TERM")
    assert saved(workflow) > before


def test_after_a_kill_the_next_call_ends_the_old_job_and_continues(workflow: FaultWorkflow) -> None:
    before = saved(workflow)
    call = workflow.call("killed", "counts.txt")
    old = workflow.running("counts")
    begins(workflow, old)
    call.signal("KILL")
    assert call.end(60) != 0
    assert [pod["metadata"]["name"] for pod in workflow.pods("counts")] == [old["metadata"]["name"]]
    name = workflow.folder / ".snakemake/auxiliary/kubernetes-owner"
    ours = name.read_text()
    name.write_text("another")
    stranger = workflow.call("stranger", "counts.txt")
    assert stranger.end(120) != 0
    assert "the same targets are made by 1 Job of another working directory: counts" in stranger.said
    name.write_text(ours)
    again = workflow.call("again", "counts.txt")
    again.wait_for("An earlier run left Jobs. Ending 1 Job")

    def new() -> list[dict]:
        return [pod for pod in workflow.pods("counts") if pod["metadata"]["name"] != old["metadata"]["name"]]

    pod = wait_for("another pod runs", new, 180, pause=0.5)[0]
    kept = saved(workflow)
    assert kept > before
    assert begins(workflow, pod).startswith(f"begins at {kept} ")
    stop(workflow, again, "HUP")  # its terminal is closed


def test_a_lost_nodes_job_runs_on_another(workflow: FaultWorkflow, cluster: Cluster) -> None:
    second = cluster.second_node
    try:
        with cluster.cordoned(cluster.node):
            call = workflow.call("lost", "counts.txt")
            pod = workflow.running("counts")
            assert pod["spec"]["nodeName"] == second.name
            begins(workflow, pod)
        second.kill()
        call.wait_for("Its Job is recreated in")
        assert "removed from its node, which does not answer" in call.said
        assert workflow.running("counts")["spec"]["nodeName"] == cluster.node.name
        # The API keeps a lost node's pod until the node is deleted; everything else is gone.
        stop(workflow, call, "TERM", lost=(pod["metadata"]["name"],))
    finally:
        cluster.remove_node()
