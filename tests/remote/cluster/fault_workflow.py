"""A small workflow of faults in its own namespace, called in the controller as a person would."""

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.cluster import Cluster
from cluster.deployment import PODS_USER, deployed_on_first_node
from cluster.images import image_name
from cluster.jobs import job
from cluster.node import Node
from cluster.paths import STATE
from cluster.shell import wait_for
from workflow_runs import ROOT

NAMESPACE = "vlmflow-faults"
PLACE = "/outputs/faults"
PREFIX_OF_PODS = "base64//L291dHB1dHMvLnBvZHMvJFZMTUZMT1dfUE9E"  # /outputs/.pods/$VLMFLOW_POD, see profiles/kubernetes
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
"""Starts Snakemake in its own session, because a process of `kubectl exec` ends with the API server."""


class Call:
    """One call of Snakemake in the controller."""

    def __init__(self, workflow: "FaultWorkflow", name: str, targets: tuple[str, ...], options: dict[str, str]) -> None:
        self.workflow = workflow
        self._file = workflow.folder / name
        options = [word for key, value in (OPTIONS | options).items() for word in (f"--{key}", value)]
        words = ["env", "--unset=SNAKEMAKE_PROFILE", "sh", "-c", DETACHED, PLACE, name, *options, "--keep-going"]
        workflow.in_controller(*words, "--", *targets)

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._file.with_suffix(".log").read_text(errors="replace")

    def wait_for(self, words: str, limit: float = 180.0) -> None:
        """Wait until the output contains a text. Raises VlmflowError if it does not."""
        wait_for(f"{self._file.name} says {words!r}", lambda: words in self.said, limit, pause=0.5)

    def signal(self, name: str) -> None:
        """Send a signal to Snakemake in the controller."""
        number = self._file.with_suffix(".pid").read_text().strip()
        self.workflow.in_controller("sh", "-c", f"kill -{name} {number}")

    def end(self, limit: float) -> int:
        """Wait until it has ended, and return its exit code."""
        code = self._file.with_suffix(".rc")
        wait_for(f"{self._file.name} ends", lambda: code.read_text().strip(), limit, pause=0.5)
        return int(code.read_text())


class FaultWorkflow:
    """The namespace. folder: PLACE, as this machine sees it."""

    def __init__(self, cluster: Cluster, volumes: Path) -> None:
        self.cluster = cluster
        self.folder = volumes / "outputs" / "faults"
        self.targets = self.folder / "targets"

    def in_controller(self, *command: str) -> None:
        """Run a command in the controller's container."""
        self.cluster.kubectl(f"--namespace={NAMESPACE}", "exec", "deployment/controller", "--", *command)

    def call(self, name: str, *targets: str, **options: str) -> Call:
        """Start Snakemake for some targets. options: override OPTIONS, with _ for -."""
        return Call(self, name, targets, {key.replace("_", "-"): value for key, value in options.items()})

    def pods(self, rule: str, phase: str = "Running") -> list[dict]:
        """Return a rule's pods in a phase that are not being deleted."""
        found = self.cluster.get("pods", namespace=NAMESPACE, labels=f"vlmflow/rule={rule}")["items"]
        return [pod for pod in found if pod["status"]["phase"] == phase and "deletionTimestamp" not in pod["metadata"]]

    def running(self, rule: str, limit: float = 180.0) -> dict:
        """Wait until a rule's pod runs, and return it."""
        return wait_for(f"{rule} runs", lambda: self.pods(rule), limit, pause=0.5)[0]

    def begun(self, rule: str) -> dict:
        """Wait until a rule's pod signals that it waits for its fault, and return the pod."""
        wait_for(f"{rule} leaves its mark", (self.folder / f"{rule}.begun").exists, 180, pause=0.5)
        return self.running(rule)

    def left(self) -> list[str]:
        """Return the names of all Jobs, their pods, and Secrets."""
        pods = self.cluster.get("pods", namespace=NAMESPACE, labels="vlmflow/rule")["items"]
        others = [self.cluster.get(kind, namespace=NAMESPACE)["items"] for kind in ("jobs", "secrets")]
        return [each["metadata"]["name"] for found in (pods, *others) for each in found]

    @contextmanager
    def urgent_pod(self, gpus: int) -> Iterator[None]:
        """Run a pod that preempts all others for its GPUs until the block ends."""
        priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
        self.cluster.apply(priority | {"value": 1000})
        urgent = job("urgent", ["sleep", "600"], image_name("data"), {"nvidia.com/gpu": str(gpus)})
        urgent["spec"]["template"]["spec"]["priorityClassName"] = "urgent"
        self.cluster.apply(urgent, "default")
        try:
            ready = ("job", "urgent", "default")
            wait_for("the urgent pod runs", lambda: self.cluster.get(*ready)["status"].get("ready"), 180)
            yield
        finally:
            self.cluster.kubectl("delete", "job", "urgent", "--namespace=default")
            self.cluster.kubectl("delete", "priorityclass", "urgent")

    def suspend(self, pod: dict, is_to_wait: bool) -> None:
        """Suspend or resume a pod's Job, as a queue does."""
        name, patch = pod["metadata"]["labels"]["job-name"], json.dumps({"spec": {"suspend": is_to_wait}})
        self.cluster.kubectl(f"--namespace={NAMESPACE}", "patch", "job", name, "--type=merge", f"--patch={patch}")

    def evict(self, pod: dict) -> None:
        """Call the eviction API, like `kubectl drain`."""
        name = pod["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        self.cluster.kubectl("create", "--raw", path, "--filename=-", input=json.dumps(eviction))


@contextmanager
def fault_workflow(cluster: Cluster) -> Iterator[FaultWorkflow]:
    """Create the namespace with the project's objects and the small workflow, and delete it at the end."""
    volumes = STATE / "volumes" / NAMESPACE
    with deployed_on_first_node(cluster, NAMESPACE, volumes, images=["data"]) as objects:
        templates = [_quick(found) for found in objects if found["kind"] == "CronJob"]
        cluster.apply([_rather_on(template, cluster.node) for template in templates])
        default = next(found for found in objects if found["metadata"]["name"] == "default")
        unpulled = _with_image(default, "unpulled", "none.invalid/vlmflow/data:0")
        cluster.apply([unpulled, _soon_given_up(_rather_on(_renamed(default, "second-node"), cluster.second_node))])
        workflow = FaultWorkflow(cluster, volumes)
        shutil.rmtree(workflow.folder, ignore_errors=True)
        shutil.copytree(Path(__file__).parent / "faults", workflow.folder)
        shutil.copytree(ROOT / "scripts", workflow.folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chown", "-R", f"{PODS_USER}:{PODS_USER}", workflow.folder], check=True)
        yield workflow


def _pod_of(template: dict) -> dict:
    """Return the spec of the pods that a CronJob would make."""
    return template["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def _quick(template: dict) -> dict:
    """Use the small image everywhere, and give ending pods less time than on a real cluster."""
    spec = _pod_of(template)
    spec["terminationGracePeriodSeconds"] = 8
    spec["containers"][0]["image"] = image_name("data")
    spec["containers"][0]["env"].append({"name": "PYTHONPATH", "value": f"{PLACE}/scripts"})
    return template


def _soon_given_up(template: dict) -> dict:
    """Count a node as lost sooner than a real cluster; the first node must not lose its pods while it is slow."""
    for toleration in _pod_of(template)["tolerations"]:
        if "tolerationSeconds" in toleration:
            toleration["tolerationSeconds"] = 5
    return template


def _rather_on(template: dict, node: Node) -> dict:
    """Make the scheduler use a node while the block runs."""
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [there]}}]
    affinity = _pod_of(template).setdefault("affinity", {})
    affinity["nodeAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return template


def _with_image(template: dict, name: str, image: str) -> dict:
    copied = _renamed(template, name)
    _pod_of(copied)["containers"][0] |= {"image": image, "imagePullPolicy": "Never"}
    return copied


def _renamed(template: dict, name: str) -> dict:
    copied = copy.deepcopy(template)
    copied["metadata"]["name"] = name
    return copied
