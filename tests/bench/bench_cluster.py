"""The cost of a pod: the project's executor and storage, compared with the plain plugins and with bare Jobs.

    python tests/bench/bench_cluster.py

Runs on the tests' own cluster (tests/remote/cluster) and prints a table in Markdown.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "remote"), str(ROOT / "tests" / "helpers"), str(ROOT / "scripts")]

import bench_nodes  # noqa: E402
import bench_waits  # noqa: E402

from cluster.binaries import binary  # noqa: E402
from cluster.cluster import Cluster  # noqa: E402
from cluster.deployment import PODS_USER, deployed  # noqa: E402
from cluster.images import image_name, project_image  # noqa: E402
from cluster.jobs import job, run  # noqa: E402
from cluster.paths import STATE  # noqa: E402

NAMESPACE = "vlmflow-bench"
PLACE = "/outputs/bench"
PIECES, ROUNDS = 4, 3
MUCH, LITTLE = 400_000_000, 1_000
"""Bytes of a job's input, and of its output."""

COUNT_IO = """
import subprocess, sys
code = subprocess.call(["/bin/sh", *sys.argv[1:]])
print("IO " + " ".join(open("/proc/self/io").read().split()), flush=True)
sys.exit(code)
"""
"""Runs a pod's command; the kernel then adds its processes' written bytes to this one's (proc_pid_io(5), wchar)."""

SETTINGS = {
    "executor": "kubernetes",
    "kubernetes-namespace": NAMESPACE,
    "kubernetes-cpu-scalar": "0.9",
    "kubernetes-persistent-volumes": "outputs:/outputs",
    "container-image": image_name("data"),
    "default-storage-provider": "fs",
    "shared-fs-usage": "none",
    "seconds-between-status-checks": "2",
    "jobs": "1",
}
OURS = {"remote-job-local-storage-prefix": "base64//L291dHB1dHMvLnBvZHMvJFZMTUZMT1dfUE9E"}
"""As in profiles/kubernetes: /outputs/.pods/$VLMFLOW_POD."""


class FirstPod:
    """Records when the first pod of a Job was seen running, until the block ends."""

    def __init__(self, cluster: Cluster) -> None:
        line = '--output=jsonpath={.status.phase}{"\\n"}'
        call = [binary("kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}", "get", "pods"]
        self._call = [str(word) for word in [*call, "--selector=job-name", "--watch-only", line]]
        self.at: float | None = None

    def __enter__(self) -> "FirstPod":
        self._watch = subprocess.Popen(self._call, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        time.sleep(0.5)  # the watch starts before the first pod
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.terminate()
        self._reader.join()

    def _read(self) -> None:
        for line in self._watch.stdout:
            if line.strip() == "Running" and self.at is None:
                self.at = time.monotonic()


class Bench:
    """The namespace of the bench."""

    def __init__(self, cluster: Cluster, volumes: Path) -> None:
        self._cluster = cluster
        self._folder = volumes / "outputs" / "bench"
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(ROOT / "tests" / "bench" / "cluster_workflow", self._folder)
        shutil.copytree(ROOT / "scripts", self._folder / "scripts")
        for place in [self._folder, *self._folder.rglob("*")]:
            os.chown(place, PODS_USER, PODS_USER)

    def snakemake(self, name: str, ours: bool, target: str, *more: str) -> tuple[float, float]:
        """Run Snakemake in the controller; return the seconds until its first pod ran, and until its end."""
        options = SETTINGS | {"default-storage-prefix": f"{PLACE}/{name}", "config": f"ours={int(ours)}"}
        flags = [word for key, value in (options | (OURS if ours else {})).items() for word in (f"--{key}", value)]
        script = f'mkdir -p {PLACE}/in-{name} && cd {PLACE}/in-{name} && cp ../Snakefile . && exec snakemake "$@"'
        with FirstPod(self._cluster) as first:
            begun = time.monotonic()
            self._in_controller(
                "env", "--unset=SNAKEMAKE_PROFILE", "sh", "-c", script, "sh", *flags, *more, "--", target
            )
            ended = time.monotonic()
        assert first.at is not None
        return first.at - begun, ended - begun

    def bare_job(self, number: int) -> float:
        """Create a Job with the same command and resources, like kubectl; return the seconds until it is complete."""
        resources = {"cpu": "900m", "memory": "600M"}
        made = job(f"bare-{number}", ["/bin/sh", "-c", "date"], image_name("data"), resources)
        begun = time.monotonic()
        run(self._cluster, made, NAMESPACE)
        return time.monotonic() - begun

    def count_io(self) -> None:
        """Make the pods of the template `default` count what they read and write."""
        command = ["/usr/bin/tini", "-g", "--", "python", "-c", COUNT_IO]
        path = "/spec/jobTemplate/spec/template/spec/containers/0/command"
        patch = [{"op": "replace", "path": path, "value": command}]
        words = ["patch", "cronjob", "default", "--type=json", f"--patch={json.dumps(patch)}"]
        self._cluster.kubectl(f"--namespace={NAMESPACE}", *words)

    def written(self, rule: str) -> int:
        """Return the total bytes that a rule's kept pod has written."""
        log = self._cluster.kubectl(f"--namespace={NAMESPACE}", "logs", f"--selector=vlmflow/rule={rule}", "--tail=5")
        words = next(line for line in log.splitlines() if line.startswith("IO ")).split()
        return int(words[words.index("wchar:") + 1])

    def forget_jobs(self) -> None:
        """Delete all kept Jobs."""
        self._cluster.kubectl(f"--namespace={NAMESPACE}", "delete", "jobs", "--all")

    def _in_controller(self, *command: str) -> str:
        return self._cluster.kubectl(f"--namespace={NAMESPACE}", "exec", "deployment/controller", "--", *command)


def pod_costs(bench: Bench, say: Callable[[str], None]) -> dict[str, float]:
    """Measure start and cost per pod in turns; return medians over the rounds, in seconds."""
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for name, ours in (("ours", True), ("plain", False)):
            first, one = bench.snakemake(f"{name}-{number}-one", ours, "piece/0.txt")
            _, many = bench.snakemake(f"{name}-{number}-many", ours, f"piece/{PIECES}.txt")
            found.setdefault(f"first pod, {name}", []).append(first)
            found.setdefault(f"per pod, {name}", []).append((many - one) / PIECES)
        found.setdefault("bare Job", []).append(bench.bare_job(number))
        say(
            f"round {number + 1} of {ROUNDS}: "
            + ", ".join(f"{key} {values[-1]:.2f} s" for key, values in found.items())
        )
    return {key: median(values) for key, values in found.items()}


def copied_bytes(bench: Bench) -> dict[str, float]:
    """Return the bytes that pods write in addition to their rule, for much and for little data."""
    bench.count_io()
    extra = {}
    for size in (MUCH, LITTLE):
        bench.snakemake(f"copied-{size}", True, f"copied/{size}", "--kubernetes-omit-job-cleanup")
        extra[size] = bench.written("copied") - size
        bench.forget_jobs()
    return extra


def main() -> None:
    """Measure and print."""
    cluster = Cluster()
    ran_before = cluster.running()
    cluster.up()
    cluster.carry_in(project_image("data"))
    volumes = STATE / "volumes" / NAMESPACE
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    try:
        with deployed(cluster, NAMESPACE, volumes):
            kubectl = f"--namespace={NAMESPACE}"
            # The plain plugin's pods are not restricted, and it needs more verbs than ours.
            cluster.kubectl(
                "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged", "--overwrite"
            )
            cluster.kubectl(
                kubectl,
                "create",
                "rolebinding",
                "bench",
                "--clusterrole=edit",
                f"--serviceaccount={NAMESPACE}:vlmflow-controller",
            )
            cluster.kubectl(kubectl, "rollout", "status", "deployment/controller", "--timeout=120s")
            bench = Bench(cluster, volumes)
            costs = pod_costs(bench, say)
            extra = copied_bytes(bench)
        waits = bench_waits.measure(cluster)
        nodes = bench_nodes.measure(cluster)
    finally:
        if not ran_before:
            cluster.down()
    bare = costs["bare Job"]
    print("\n| seconds, median of rounds in turns | ours | plain plugin | ratio |\n|---|---:|---:|---:|")
    first = costs["first pod, ours"], costs["first pod, plain"]
    print(
        f"| start of Snakemake to the first pod running | {first[0]:.2f} | {first[1]:.2f} | {first[0] / first[1]:.2f} |"
    )
    over = costs["per pod, ours"] - bare, costs["per pod, plain"] - bare
    print(
        f"| a pod of a rule, over the bare Job ({bare:.2f}) | {over[0]:.2f} | {over[1]:.2f} | {over[0] / over[1]:.2f} |"
    )
    share = (extra[MUCH] - extra[LITTLE]) / (2 * (MUCH - LITTLE))
    print(f"\nBytes copied per byte of input and output (0.01 allowed): {share:.5f}")
    print(f"\n{bench_waits.report(waits)}")
    print(f"\n{bench_nodes.report(nodes)}")


if __name__ == "__main__":
    main()
