"""How long a training takes to its first step: in one pod of two processes, and in two pods of one.

    python tests/bench/bench_nodes.py

bench_cluster.py prints the same figures. Each run is a smoke stage of the demo on the tests' cluster; the time counts
from the start of the pod's container that runs the rule.
"""

import shutil
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "remote"), str(ROOT / "tests" / "helpers"), str(ROOT / "scripts")]

from cluster.addons import start_dns  # noqa: E402
from cluster.cluster import Cluster  # noqa: E402
from cluster.cluster_workflow import ClusterWorkflow  # noqa: E402
from cluster.deployment import deployed_on_first_node  # noqa: E402
from cluster.paths import STATE  # noqa: E402
from workflow_runs import RUN, checkout, make_demo_folder  # noqa: E402

NAMESPACE = "vlmflow-bench-nodes"
ROUNDS = 3


def seconds_to_first_step(project: ClusterWorkflow, nodes: int, number: int) -> float:
    """Run a smoke stage on so many nodes; return the seconds from its rule's start to the first step."""
    shape = f"runs={{{RUN}: {{nodes: {nodes}, processes: {2 // nodes}, train: {{seed: {number}}}}}}}"
    files = [word for word in project.words() if word != f"merged/{RUN}"][:-1]
    words = [*files, "--config", shape, "--", f"checkpoints/{RUN}/smoke"]
    shutil.rmtree(project.volumes / "outputs" / "runs", ignore_errors=True)
    project.pods.clear()
    running = threading.Thread(target=project.run, args=words)
    running.start()
    first = 0.0
    while not first and running.is_alive():
        time.sleep(0.05)
        files_now = (project.volumes / "outputs" / "runs" / RUN / "smoke").glob("*/progress.jsonl")
        first = time.time() if any('"loss": ' in file.read_text() for file in files_now) else 0.0
    running.join()
    begun = min(map(_started, project.rules()["train_smoke"]))
    return first - begun


def _started(pod: dict) -> float:
    status = pod["status"]["containerStatuses"][0]["state"]
    text = (status.get("terminated") or status["running"])["startedAt"]
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


def measure(cluster: Cluster) -> dict[int, float]:
    """Return the median seconds by number of nodes, in turns."""
    start_dns(cluster)
    found: dict[int, list[float]] = {1: [], 2: []}
    volumes = STATE / "volumes" / NAMESPACE
    with tempfile.TemporaryDirectory() as folder:
        demo = make_demo_folder(Path(folder) / "demo")
        with deployed_on_first_node(cluster, NAMESPACE, volumes, images=["data", "train"]):
            project = ClusterWorkflow(cluster, NAMESPACE, volumes, checkout(Path(folder) / "checkout"))
            project.bring(demo)
            for number in range(ROUNDS):
                for nodes, seconds in found.items():
                    seconds.append(seconds_to_first_step(project, nodes, number))
                    print(f"round {number + 1}, {nodes} node(s): {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return {nodes: median(seconds) for nodes, seconds in found.items()}


def report(seconds: dict[int, float]) -> str:
    """Return the figures as a sentence."""
    return (
        f"From a rule's start to its first step: {seconds[1]:.1f} s in one pod of two processes, {seconds[2]:.1f} s in "
        f"two pods of one ({seconds[2] / seconds[1]:.2f})."
    )


def main() -> None:
    """Measure and print."""
    cluster = Cluster()
    ran_before = cluster.running()
    cluster.up()
    try:
        print(report(measure(cluster)))
    finally:
        if not ran_before:
            cluster.down()


if __name__ == "__main__":
    main()
