"""A training in two pods, each on its own node: the demo with `nodes: 2`, which loses a pod, a node, a controller."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cluster_workflow import BETWEEN, STEPS, TWO_NODES, ClusterWorkflow, begin, pods, steps
from cluster.shell import wait_for
from vlmflow.core.files import sha256_of
from workflow_runs import RUN

LATE = "snakejob-of-an-earlier-attempt"


@dataclass(frozen=True)
class Training:
    """What Snakemake said in the controller; the node of each pod at first; what a late pod did."""

    said: str
    nodes: list[str]
    late: str


def start_late_pod(project: ClusterWorkflow, of: dict) -> None:
    """Start a pod of another attempt by hand, like one that its node still starts when its group has come to an end."""
    spec = {key: value for key, value in of["spec"].items() if key not in ("nodeName", "affinity", "hostname")}
    container = spec["containers"][0]
    container["env"] = [each for each in container["env"] if each["name"] not in ("VLMFLOW_ATTEMPT", "VLMFLOW_NODE_0")]
    container["env"] = [each for each in container["env"] if each["name"] != "JOB_COMPLETION_INDEX"]
    container["env"] += [{"name": "VLMFLOW_ATTEMPT", "value": LATE}, {"name": "JOB_COMPLETION_INDEX", "value": "1"}]
    container["resources"] = {"requests": {"cpu": "10m", "memory": "200M", "ephemeral-storage": "100M"}}
    metadata = {"name": LATE, "labels": {"app.kubernetes.io/part-of": "vlmflow", "vlmflow/group": LATE}}
    project.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, project.namespace)


@pytest.fixture(scope="module")
def training(finished: ClusterWorkflow, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training in two pods, of which one is deleted."""
    project, shown = finished, tmp_path_factory.mktemp("shown") / "output"
    in_namespace = f"--namespace={project.namespace}"
    asked = begin(project, shown)
    first = pods(project)
    start_late_pod(project, first[1])
    project.cluster.kubectl(in_namespace, "delete", "pod", first[0]["metadata"]["name"])
    try:
        assert asked.wait(600) == 0, shown.read_text()[-8000:]

        def said() -> str:
            log = project.cluster.kubectl("logs", LATE, in_namespace)
            return log if "waiting for node 0" in log else ""

        late = str(wait_for("the late pod waits", said, 120, pause=1))
    finally:
        project.cluster.kubectl("delete", "pod", LATE, in_namespace)
    return Training(shown.read_text(), [pod["spec"]["nodeName"] for pod in first], late)


def test_each_pod_has_a_node_of_its_own(training: Training, project: ClusterWorkflow) -> None:
    assert set(training.nodes) == {project.cluster.node.name, project.cluster.second_node.name}


@pytest.mark.slow
def test_the_smoke_run_has_the_same_nodes(training: Training, project: ClusterWorkflow) -> None:
    project.forget_pods()
    project.run(*project.words("--config", TWO_NODES, targets=[f"checkpoints/{RUN}/smoke"]))
    gate = json.loads((project.targets / "checkpoints" / RUN / "smoke" / "gate.json").read_text())
    (together,) = (check for check in gate["checks"] if "train together" in check["check"])
    assert together == {"check": "2 processes train together", "passed": True, "detail": "DISTRIBUTED"}
    groups = [pod for pod in project.rules()["train_smoke"] if "vlmflow/group" in pod["metadata"]["labels"]]
    assert len({pod["spec"]["nodeName"] for pod in groups}) == 2


def test_the_weights_are_those_of_one_node(training: Training, project: ClusterWorkflow, here: Path) -> None:
    there = project.targets / "checkpoints" / RUN / "full" / "adapter_model.safetensors"
    assert sha256_of(there) == sha256_of(here / there.name)


def test_a_deleted_pod_costs_no_step_and_no_retry(training: Training, project: ClusterWorkflow) -> None:
    assert "Error in rule" not in training.said
    words = rf"train_model run={RUN}: pod 0( or 1)?: its pod was removed.* this uses no retry"
    assert re.search(words, training.said), training.said[-8000:]
    assert training.said.count("this uses no retry") == 1
    assert steps(project) == list(range(1, STEPS + 1))


def test_a_pod_of_an_earlier_attempt_joins_nothing(training: Training) -> None:
    assert training.late.strip().splitlines()[-1] == f"node 1: waiting for node 0 of attempt {LATE}"


def test_nothing_is_left(training: Training, project: ClusterWorkflow) -> None:
    left = {"namespace": project.namespace, "labels": "vlmflow/group"}

    def everything() -> list[str]:
        return [one["metadata"]["name"] for kind in ("pods", "jobs", "services") for one in kinds(kind)]

    def kinds(kind: str) -> list[dict]:
        return project.cluster.get(kind, **left)["items"]

    wait_for("pods, Jobs and Services go", lambda: everything() == [], 60)
    assert list((project.volumes / "outputs" / "runs").rglob("launch-*")) == []


def controller(project: ClusterWorkflow) -> dict:
    labels = {"namespace": project.namespace, "labels": "app.kubernetes.io/name=controller"}
    return project.cluster.get("pods", **labels)["items"][0]


@pytest.mark.slow
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
    assert twice <= BETWEEN, "checkpoint_steps"
    assert len(trained) - len(set(trained)) == twice, "the controller's end cost no step"
