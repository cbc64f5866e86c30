"""A training in a pod meets another trainer, must end, and loses its controller: each time it resumes."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cluster.cluster_workflow import ClusterWorkflow
from cluster.shell import wait_for
from workflow_runs import RUN

pytestmark = pytest.mark.slow  # test_demo_nodes.py deletes a pod, too, and test_executor.py kills a controller

STEPS = 120
TRAIN = f"max_steps: {STEPS}, checkpoint_steps: 6, evaluation_steps: 6, learning_rate: 5e-3"
LONG = f"runs={{qwen3vl-fire: {{train: {{{TRAIN}}}}}}}"
"""A longer training than test_demo's, so that two events are in its middle."""


@dataclass(frozen=True)
class Training:
    """The output of Snakemake, and of another trainer that met the first pod, `first`, in its run folder."""

    said: str
    first: str
    another: str


def steps(project: ClusterWorkflow) -> list[int]:
    """Return the steps that the trainers of this run have logged so far."""
    files = (project.volumes / "outputs" / "runs" / RUN / "full").glob("*/progress.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if line.get("target") == STEPS and "loss" in line]


def pods(project: ClusterWorkflow, selector: str) -> list[dict]:
    found = project.cluster.get("pods", namespace=project.namespace, labels=selector)["items"]
    return [pod for pod in found if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]


def trainer(project: ClusterWorkflow) -> str:
    """Wait until a trainer's pod has made some more steps, and return the pod's name."""
    pod = wait_for("train_model runs", lambda: pods(project, "vlmflow/rule=train_model"), 240, pause=1)[0]
    begun = len(steps(project))
    wait_for("it trains", lambda: len(steps(project)) > begun + 4, 240, pause=0.5)
    return pod["metadata"]["name"]


@contextmanager
def another_trainer(project: ClusterWorkflow, first: str) -> Iterator[str]:
    """Make a second pod run the trainer, and return its output once it has met the first one."""
    in_namespace = f"--namespace={project.namespace}"
    spec = project.cluster.get("pod", first, project.namespace)["spec"]
    kept = {key: value for key, value in spec.items() if key not in ("nodeName", "tolerations")}
    asked = {"memory": "2G", "ephemeral-storage": "1G"}
    kept["containers"][0]["resources"] = {"requests": asked | {"cpu": "100m"}, "limits": asked | {"cpu": "2"}}
    again = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "another-trainer"}, "spec": kept}
    project.cluster.apply(again, project.namespace)
    log = ("logs", "another-trainer", in_namespace)

    def met() -> str:
        said = project.cluster.kubectl(*log)
        return said if "to end its training" in said else ""

    try:
        yield wait_for("the second trainer meets the first", met, 120, pause=1)
    finally:
        project.cluster.kubectl("delete", "pod", "another-trainer", in_namespace)


def has_restarted(project: ClusterWorkflow) -> bool:
    status = pods(project, "app.kubernetes.io/name=controller")[0]["status"]["containerStatuses"][0]
    return status["restartCount"] > 0 and status["ready"]


@pytest.fixture(scope="module")
def training(finished: ClusterWorkflow, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training whose pod is deleted, and whose controller is killed later; a follower sees all output."""
    project, shown = finished, tmp_path_factory.mktemp("shown") / "output"
    in_namespace = f"--namespace={project.namespace}"
    words = project.words("--config", LONG, "--allowed-rules", "train_model", targets=[f"checkpoints/{RUN}/full"])
    with shown.open("wb") as output:
        asked = subprocess.Popen(project.ask("run", *words), env=project.environment, stdout=output)
    first = trainer(project)
    with another_trainer(project, first) as another:
        before = len(steps(project))
        wait_for("the first trains on", lambda: len(steps(project)) > before, 120, pause=0.5)
    project.cluster.kubectl(in_namespace, "delete", "pod", first)  # waits for its end: SIGTERM, then the checkpoint
    trainer(project)
    project.cluster.kill(pods(project, "app.kubernetes.io/name=controller")[0])
    wait_for("the controller is there again", lambda: has_restarted(project), 120, pause=1)
    assert asked.wait(600) == 0, shown.read_text()[-8000:]  # followed in the killed container, and then in the next one
    again = subprocess.run(project.ask("log"), env=project.environment, capture_output=True, text=True, check=True)
    assert shown.read_text().endswith(again.stdout)
    return Training(again.stdout, first, another)


def test_a_second_trainer_keeps_out_of_the_run_folder(training: Training) -> None:
    assert re.search(rf"waiting for process \d+ on {training.first} to end its training", training.another)


def test_a_pod_that_must_end_saves_a_checkpoint_and_the_next_resumes(
    training: Training, project: ClusterWorkflow
) -> None:
    log = (project.targets / "logs" / "train_model" / f"{RUN}.log").read_text()
    assert re.search(rf"resuming from step \d+ of {STEPS}", log)
    assert "its Job" not in training.said.partition("The controller came back")[0].split("Error in rule")[0]


def test_a_killed_controller_continues_the_run(training: Training) -> None:
    before, back, after = training.said.partition("The controller came back: the run continues.")
    assert back
    assert "deleted by hand. Its Job is recreated in" in before
    assert "Error in rule" not in before
    assert "An earlier run left Jobs. Ending 1 Job; their pods save their work first: train_model" in after
    assert "Error in rule" not in after


def test_no_step_was_trained_twice(training: Training, project: ClusterWorkflow) -> None:
    assert steps(project) == list(range(1, STEPS + 1))
