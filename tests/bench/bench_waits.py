"""The cost of explaining why twenty Jobs wait, on a cluster with 400 nodes (simulated by kwok) and 500 pods.

    python tests/bench/bench_waits.py

bench_cluster.py prints the same figures. A check that reads nodes, pods and events again is the most expensive.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "remote"), str(ROOT / "tests" / "helpers"), str(ROOT / "scripts")]

from cluster.addons import fake_node, start_fake_nodes  # noqa: E402
from cluster.cluster import Cluster  # noqa: E402
from cluster.jobs import job  # noqa: E402
from cluster.kubectl import a_namespace  # noqa: E402
from cluster.shell import wait_for  # noqa: E402
from vlmflow.remote.cluster.api import connect  # noqa: E402
from vlmflow.remote.job import RuleJob  # noqa: E402
from vlmflow.remote.kubernetes.job_shape import INVOCATION  # noqa: E402
from vlmflow.remote.kubernetes.namespace import Namespace  # noqa: E402
from vlmflow.remote.kubernetes.watch import READ_EVERY, Watch  # noqa: E402

NAMESPACE = "vlmflow-waits"
NODES, PODS, WAITING, LOOKS = 400, 500, 20, 9
GPU = "nvidia.com/gpu"
LABELS = {INVOCATION: "bench"}


def busy_node(number: int) -> dict:
    """Return a node with an API object of realistic size: kubelets list their images."""
    node = fake_node(f"wait-{number}", {GPU: "8"})
    images = [{"names": [f"r.io/group/image-{n}@sha256:{'0' * 64}"], "sizeBytes": 10**9} for n in range(40)]
    node["status"]["images"] = images
    return node


def busy_pod(number: int) -> dict:
    """Return somebody else's pod, which uses four of a node's GPUs."""
    made = job(f"other-{number}", ["true"], "none", {GPU: "4", "cpu": "4", "memory": "16Gi"})
    spec = made["spec"]["template"]["spec"] | {"nodeName": f"wait-{number % NODES}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made["metadata"], "spec": spec}


def waiting_job(number: int) -> dict:
    """Return a Job whose pod requests more GPUs than any node has free."""
    made = job(f"waits-{number}", ["true"], "none", {GPU: "8"})
    made["metadata"]["labels"] = LABELS
    made["spec"]["template"]["metadata"] = {"labels": LABELS}
    return made


def seconds_per_look(cluster: Cluster) -> dict[str, float]:
    """Measure the CPU seconds of a check of all waiting Jobs: median and worst, with and without reading all again."""
    names = [f"waits-{number}" for number in range(WAITING)]
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    now, said = 1_000.0, []
    watch = Watch(Namespace(connect(print), NAMESPACE), f"{INVOCATION}=bench", said.append, lambda: now)
    for name in names:
        watch.follow(name, RuleJob("train_model", {"run": name}), None)
    costs: dict[str, list[float]] = {"reads all": [], "between": []}
    for number in range(2 * LOOKS):
        kind = "between" if number % 2 else "reads all"
        now += 2.0 if number % 2 else READ_EVERY
        begun = time.process_time()
        outcomes = watch.look(names)
        costs[kind].append(time.process_time() - begun)
        assert all(outcome.state == "waiting" for outcome in outcomes.values())
    assert sum(f"{GPU}: 8 asked" in line for line in said) == WAITING, said[:3]
    return {
        "reads all, median": median(costs["reads all"]),
        "reads all, worst": max(costs["reads all"]),
        "between, median": median(costs["between"]),
    }


def measure(cluster: Cluster) -> dict[str, float]:
    """Create nodes, pods and Jobs, measure, and delete them."""
    start_fake_nodes(cluster)
    nodes = [busy_node(number) for number in range(NODES)]
    try:
        cluster.apply(nodes)
        with cluster.having(a_namespace(NAMESPACE)):
            cluster.apply([busy_pod(number) for number in range(PODS)], NAMESPACE)
            cluster.apply([waiting_job(number) for number in range(WAITING)], NAMESPACE)

            def refused() -> bool:
                pods = cluster.get("pods", namespace=NAMESPACE, labels=f"{INVOCATION}=bench")["items"]
                return len(pods) == WAITING and all(pod["status"].get("conditions") for pod in pods)

            wait_for("the scheduler has looked at every pod", refused, 180, pause=1)
            return seconds_per_look(cluster)
    finally:
        cluster.kubectl("delete", "nodes", *(node["metadata"]["name"] for node in nodes), "--wait=false")


def report(costs: dict[str, float]) -> str:
    """Return the figures in one line."""
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in costs.items())
    return f"CPU of a look at {WAITING} waiting Jobs, {NODES} nodes and {PODS} pods (0.2 s allowed): {parts}"


if __name__ == "__main__":
    tests_cluster = Cluster()
    ran_before = tests_cluster.running()
    tests_cluster.up()
    try:
        print(report(measure(tests_cluster)))
    finally:
        if not ran_before:
            tests_cluster.down()
