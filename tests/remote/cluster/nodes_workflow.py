"""A training in two pods, each on its own node: the demo with `nodes: 2`."""

import json
import subprocess
from pathlib import Path

from cluster.addons import start_dns
from cluster.cluster_workflow import ClusterWorkflow
from cluster.shell import wait_for
from workflow_runs import RUN

STEPS = 50
TRAIN = f"train: {{max_steps: {STEPS}, checkpoint_steps: 5, evaluation_steps: 5}}"
ONE_NODE = f"runs={{{RUN}: {{nodes: 1, processes: 2, {TRAIN}}}}}"
TWO_NODES = f"runs={{{RUN}: {{nodes: 2, processes: 1, {TRAIN}}}}}"


def begin(project: ClusterWorkflow, shown: Path) -> subprocess.Popen:
    """Start the full training, after a finished run. shown: the file for Snakemake's output."""
    start_dns(project.cluster)
    files = [word for word in project.words() if word != f"merged/{RUN}"][:-1]
    only = ["--config", TWO_NODES, "--allowed-rules", "train_model"]
    words = [*files, *only, "--", f"checkpoints/{RUN}/full"]
    with shown.open("wb") as output:
        return subprocess.Popen(project.ask("run", "--", *words), env=project.environment, stdout=output)


def steps(project: ClusterWorkflow) -> list[int]:
    """Return the steps that the trainers have logged so far."""
    files = (project.volumes / "outputs" / "runs" / RUN / "full").glob("*/progress.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if line.get("target") == STEPS and "loss" in line]


def pods(project: ClusterWorkflow) -> list[dict]:
    """Return the group's pods, once all of them run and have made some more steps."""

    def all_run() -> list[dict]:
        found = project.cluster.get("pods", namespace=project.namespace, labels="vlmflow/rule=train_model")["items"]
        found = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return found if [pod["status"]["phase"] for pod in found] == ["Running"] * 2 else []

    found = wait_for("both pods run", all_run, 240, pause=1)
    begun = len(steps(project))
    wait_for("they train", lambda: len(steps(project)) > begun + 3, 240, pause=0.3)
    return sorted(found, key=lambda pod: pod["metadata"]["name"])
