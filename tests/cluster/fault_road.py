"""A small workflow of faults in a namespace of its own, called in the controller as a person does."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.cluster import Cluster
from cluster.deployment import PODS_USER, deployed
from cluster.images import image_name, project_image
from cluster.paths import STATE
from cluster.shell import wait_for
from roads import ROOT

NAMESPACE = "vlmflow-faults"
PLACE = "/outputs/faults"
PREFIX_OF_PODS = "base64//L291dHB1dHMvLnBvZHMvJEhPU1ROQU1F"  # /outputs/.pods/$HOSTNAME, see profiles/kubernetes
OPTIONS = {
    "executor": "kubernetes",
    "kubernetes-namespace": NAMESPACE,
    "kubernetes-cpu-scalar": "1",
    "container-image": image_name("data"),
    "jobs": "20",
    "cores": "all",
    "retries": "2",
    "default-storage-provider": "fs",
    "default-storage-prefix": f"{PLACE}/targets",
    "shared-fs-usage": "none",
    "remote-job-local-storage-prefix": PREFIX_OF_PODS,
    "seconds-between-status-checks": "2",
}


DETACHED = """
cd "$0" && name=$1 && shift
exec setsid --fork sh -c 'sh -c '"'"'echo $$ > "$0.pid"; exec snakemake "$@"'"'"' "$0" "$@" > "$0.log" 2>&1
                          echo $? > "$0.rc"' "$name" "$@" < /dev/null > /dev/null 2>&1
"""
"""Starts Snakemake in a session of its own: what reaches the controller by `kubectl exec` ends with the API server."""


class Call:
    """One call of Snakemake in the controller."""

    def __init__(self, road: "FaultRoad", name: str, targets: tuple[str, ...]) -> None:
        self.road = road
        self._file = road.folder / name
        options = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
        words = ["env", "--unset=SNAKEMAKE_PROFILE", "sh", "-c", DETACHED, PLACE, name, *options, "--keep-going"]
        road.in_controller(*words, "--", *targets)

    @property
    def said(self) -> str:
        """What it has said so far."""
        return self._file.with_suffix(".log").read_text(errors="replace")

    def wait_for(self, words: str, limit: float = 90.0) -> None:
        """Wait until it has said something. Raises VlmflowError where it has not."""
        wait_for(f"{self._file.name} says {words!r}", lambda: words in self.said, limit, pause=0.5)

    def signal(self, name: str) -> None:
        """Send a signal to Snakemake in the controller."""
        number = self._file.with_suffix(".pid").read_text().strip()
        self.road.in_controller("sh", "-c", f"kill -{name} {number}")

    def end(self, limit: float) -> int:
        """Wait until it has ended, and give its exit code."""
        code = self._file.with_suffix(".rc")
        wait_for(f"{self._file.name} ends", lambda: code.read_text().strip(), limit, pause=0.5)
        return int(code.read_text())


class FaultRoad:
    """The namespace. folder: PLACE, as this machine sees it."""

    def __init__(self, cluster: Cluster, volumes: Path) -> None:
        self.cluster = cluster
        self.folder = volumes / "outputs" / "faults"
        self.targets = self.folder / "targets"

    def in_controller(self, *command: str) -> None:
        """Run a command in the controller's container."""
        self.cluster.kubectl(f"--namespace={NAMESPACE}", "exec", "deployment/controller", "--", *command)

    def call(self, name: str, *targets: str) -> Call:
        """Start Snakemake for some targets."""
        return Call(self, name, targets)

    def pods(self, rule: str, phase: str = "Running") -> list[dict]:
        """Give a rule's pods of a phase that are not told to end."""
        found = self.cluster.get("pods", namespace=NAMESPACE, labels=f"vlmflow/rule={rule}")["items"]
        return [pod for pod in found if pod["status"]["phase"] == phase and "deletionTimestamp" not in pod["metadata"]]

    def running(self, rule: str, limit: float = 90.0) -> dict:
        """Wait until a rule's pod runs, and give it."""
        return wait_for(f"{rule} runs", lambda: self.pods(rule), limit, pause=0.5)[0]

    def left(self) -> list[str]:
        """Give the names of all Jobs, their pods, and Secrets."""
        pods = self.cluster.get("pods", namespace=NAMESPACE, labels="vlmflow/rule")["items"]
        others = [self.cluster.get(kind, namespace=NAMESPACE)["items"] for kind in ("jobs", "secrets")]
        return [each["metadata"]["name"] for found in (pods, *others) for each in found]

    def evict(self, pod: dict) -> None:
        """Ask the eviction API, as `kubectl drain` does."""
        name = pod["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        self.cluster.kubectl("create", "--raw", path, "--filename=-", input=json.dumps(eviction))


@contextmanager
def fault_road(cluster: Cluster) -> Iterator[FaultRoad]:
    """Make the namespace with the project's objects and the small workflow, and take it away in the end."""
    cluster.carry_in(project_image("data"))
    volumes = STATE / "volumes" / NAMESPACE
    with deployed(cluster, NAMESPACE, volumes) as objects:
        cluster.apply([_quick(found) for found in objects if found["kind"] == "PodTemplate"])
        default = next(found for found in objects if found["metadata"]["name"] == "default")
        cluster.apply(_with_image(default, "unpulled", "none.invalid/vlmflow/data:0"))
        road = FaultRoad(cluster, volumes)
        shutil.rmtree(road.folder, ignore_errors=True)
        shutil.copytree(Path(__file__).parent / "faults", road.folder)
        shutil.copytree(ROOT / "scripts", road.folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chown", "-R", f"{PODS_USER}:{PODS_USER}", road.folder], check=True)
        cluster.kubectl(f"--namespace={NAMESPACE}", "rollout", "status", "deployment/controller", "--timeout=120s")
        yield road


def _quick(template: dict) -> dict:
    """Use the small image for all, and give lost nodes and ending pods less time than on a real cluster."""
    spec = template["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 15
    spec["containers"][0]["image"] = image_name("data")
    for toleration in spec["tolerations"]:
        if "tolerationSeconds" in toleration:
            toleration["tolerationSeconds"] = 5
    return template


def _with_image(template: dict, name: str, image: str) -> dict:
    copy = json.loads(json.dumps(template))
    copy["metadata"]["name"] = name
    copy["template"]["spec"]["containers"][0] |= {"image": image, "imagePullPolicy": "IfNotPresent"}
    return copy
