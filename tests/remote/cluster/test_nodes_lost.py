"""A training in two pods loses a node, which comes back, and then its controller."""

import re
from pathlib import Path

import pytest

from cluster.cluster_workflow import ClusterWorkflow
from cluster.nodes_workflow import STEPS, begin, pods, steps
from cluster.shell import wait_for
from workflow_runs import RUN

pytestmark = pytest.mark.slow


def controller(project: ClusterWorkflow) -> dict:
    labels = {"namespace": project.namespace, "labels": "app.kubernetes.io/name=controller"}
    return project.cluster.get("pods", **labels)["items"][0]


def test_a_lost_node_and_a_killed_controller_cost_the_steps_since_the_last_checkpoint(
    finished: ClusterWorkflow, tmp_path: Path
) -> None:
    project = finished
    shown, second = tmp_path / "output", project.cluster.second_node
    asked = begin(project, shown)
    there = next(pod for pod in pods(project) if pod["spec"]["nodeName"] == second.name)
    second.stop_kubelet()
    project.cluster.kill(there)  # with the kubelet stopped, the API server does not learn of it
    lost = rf"train_model run={RUN}: pod [01]: removed from its node, which does not answer"
    wait_for("the loss is noticed", lambda: re.search(lost, shown.read_text()), 600, pause=1)
    second.start_kubelet()
    pods(project)
    before = steps(project)
    project.cluster.kill(controller(project))
    assert asked.wait(900) == 0, shown.read_text()[-8000:]
    said, trained = shown.read_text(), steps(project)
    assert "An earlier run left Jobs. Ending 1 Job; their pods save their work first: train_model" in said
    assert "Error in rule" not in said
    log = (project.targets / "logs" / "train_model" / f"{RUN}.log").read_text()
    assert re.search(rf"resuming from step \d+ of {STEPS}", log)
    assert sorted(set(trained)) == list(range(1, STEPS + 1))
    twice = len(before) - len(set(before))
    assert twice <= 5, "checkpoint_steps"
    assert len(trained) - len(set(trained)) == twice, "the controller's end cost no step"
