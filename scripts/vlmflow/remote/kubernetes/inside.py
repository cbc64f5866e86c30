"""Looks from inside the cluster, by short Jobs: images, volumes, clocks, and processes that train together.

A probe is a pod of a template, with our command.
"""

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from vlmflow.remote import folder_trials
from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.groups import CONTAINER, NODE, as_attempt, main_container, node_of, with_pods
from vlmflow.remote.doctor import Finding, check_folder, last_of_form
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.needs import Need, gpu_resource
from vlmflow.remote.kubernetes.outcome import judge
from vlmflow.remote.kubernetes.waiting import ClusterState, Waiting, explain
from vlmflow.remote.library import NODE_0, PORT

IN_POD = Path(folder_trials.__file__).read_text()
DDP_TRIAL = Path(__file__).with_name("ddp_trial.py").read_text()
"""Programs that a pod's Python gets as text, because its image has none of our files."""

FOLDERS = {"cache": "/cache", "outputs": "/outputs"}
"""The claims, and the folders where pods mount them."""

POLL = 1.0
LIFETIME = 900
"""Seconds after which the cluster removes an ended probe, if this process has died."""

DEADLINE = 3600
"""Seconds after which the cluster ends a probe. They include the pull of the image, which may take half an hour."""

PASSING = ("Operation cannot be fulfilled", "status unknown for quota")
"""Refusals after which the Job controller retries: two pods met in one quota, or a quota is not counted yet."""

SMALL = {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "256Mi"}
"""What a probe requests that trains nothing."""


class Surroundings(msgspec.Struct, frozen=True):
    """What `folder_trials.py` prints: what a pod sees of itself.

    user: the user's number. time: the pod's clock, in seconds since 1970. python: its version ("3.12.1").
    folders: for each folder in its arguments, the errors by trial; {} without errors. packages: versions by name.
    """

    user: int
    time: float
    python: str
    folders: dict[str, dict[str, str]]
    packages: dict[str, str | None]


class TrialTraining(msgspec.Struct, frozen=True):
    """What `ddp_trial.py` prints. wrong: why the training failed; then the other fields are empty.

    processes: their number, on all nodes. gigabytes_per_second: the bandwidth among all of them. within_node: among
    those of a node. between_nodes: among one of each node. shared_memory_mb: the size of /dev/shm.
    """

    wrong: str = ""
    backend: str = ""
    processes: int = 0
    device: str = ""
    gigabytes_per_second: float = 0.0
    shared_memory_mb: int = 0
    nodes: int = 1
    within_node: float = 0.0
    between_nodes: float = 0.0


Form = TypeVar("Form", bound=msgspec.Struct)


@dataclass(frozen=True)
class Answer(Generic[Form]):
    """The result of a probe.

    image: the image that it ran. node: where it ran.
    made, ended: the API server's clock when the Job was created and when its end was seen.
    report: what it printed last; None if it printed nothing of this form. fault: why there is no report.
    """

    image: str
    made: datetime | None = None
    ended: datetime | None = None
    report: Form | None = None
    fault: str = ""
    node: str = ""


class Probe(Generic[Form]):
    """One Job, created at once; `answer` waits for it and deletes it."""

    def __init__(self, cluster: Namespace, form: type[Form], job: Object) -> None:
        """Create the Job. form: of the line of JSON that its command prints. job: from `probe_job`."""
        self._cluster = cluster
        self._form = form
        self._name = f"vlmflow-doctor-{uuid.uuid4().hex[:8]}"
        self._job = as_attempt(job, self._name)
        self._image, self._fault = main_container(self._job)["image"], ""
        self._made: datetime | None = None
        try:
            cluster.create_job(self._job)
            self._made = cluster.now()
        except Refused as refused:
            self._fault = f"the Job was refused: {refused}"

    def answer(self, patience: float) -> Answer[Form]:
        """Wait up to `patience` seconds for the pod to end; returns its answer, or why there is none."""
        if self._fault:
            return Answer(self._image, fault=self._fault)
        try:
            return self._wait(time.monotonic() + patience)
        except Refused as refused:
            return Answer(self._image, fault=str(refused))
        finally:
            self.remove()

    def remove(self) -> None:
        """Delete the Job and its pod; if the API server does not answer, DEADLINE and LIFETIME end them."""
        with suppress(Refused):
            self._cluster.delete_job(self._name)

    def _wait(self, until: float) -> Answer[Form]:
        while True:
            pods = self._cluster.pods(f"job-name={self._name}")
            pod = min(pods, key=_decides, default={})
            phase = pod.get("status", {}).get("phase")
            if phase in ("Succeeded", "Failed"):
                break
            waiting = explain(self._job, pods, ClusterState(events=self._cluster.events()))
            if time.monotonic() > until or (phase != "Running" and is_refused(waiting)):
                return Answer(self._image, fault=f"its pod does not start: {waiting.why}")
            time.sleep(POLL)
        log = self._cluster.log(pod["metadata"]["name"], CONTAINER)
        report, fault = last_of_form(log, self._form), ""
        if report is None:
            why = log.strip()[-500:] or judge(None, [pod], None, self._cluster.now()).ended.cause or "it says nothing"
            fault = f"its pod ended as {phase}: {why}"
        node = pod["spec"].get("nodeName", "")
        return Answer(self._image, self._made, self._cluster.now(), report, fault, node)


def is_refused(waiting: Waiting) -> bool:
    """Return whether a person need not wait for a pod: the cluster refuses it, and not just for a moment."""
    if any(words in waiting.why for words in PASSING):
        return False
    at_once = waiting.hopeless_after is not None and not waiting.again
    return at_once or "cannot be pulled" in waiting.why or "is exhausted" in waiting.why


def _decides(pod: Object) -> tuple[bool, bool, int]:
    """Return a key by which the pod comes first that decides about a probe: a failed one, one that waits, or pod 0."""
    phase = pod.get("status", {}).get("phase")
    return phase != "Failed", phase != "Pending", node_of(pod)


def probe_job(
    template: Object, command: list[str], resources: dict[str, str] = SMALL, elsewhere_than: str = "", nodes: int = 1
) -> Object:
    """Return the Job of a probe, without a name: the template's pod with another command and other resources.

    resources: its requests and limits. elsewhere_than: a node on which it must not run. nodes: so many pods.
    """
    metadata, pod = deepcopy(template["metadata"]), deepcopy(template["template"])
    pod["spec"] |= {"restartPolicy": "Never", "activeDeadlineSeconds": DEADLINE, "terminationGracePeriodSeconds": 5}
    if elsewhere_than:
        # A node needs to match only one term, so each term excludes it.
        affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
        for term in required["nodeSelectorTerms"]:
            field = {"key": "metadata.name", "operator": "NotIn", "values": [elsewhere_than]}
            term.setdefault("matchFields", []).append(field)
    labels = {"app.kubernetes.io/part-of": "vlmflow", "app.kubernetes.io/component": "doctor"}
    own = pod.get("metadata") or {}
    pod["metadata"] = {"labels": (own.get("labels") or {}) | labels, "annotations": own.get("annotations") or {}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        # The Job carries a queue's label, like those of a run: a cluster may suspend or refuse Jobs without one.
        "metadata": {"labels": (metadata.get("labels") or {}) | labels},
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": LIFETIME, "template": pod},
    }
    container = main_container(job)
    container.pop("args", None)
    container |= {"command": command, "resources": {"requests": resources, "limits": resources}}
    return with_pods(job, nodes) if nodes > 1 else job


def look_inside(cluster: Namespace, template: Object, lock: Path, name: str) -> Probe[Surroundings]:
    """Start a probe of a template's image; only that of the data image also tries the volumes.

    name: the folder that it leaves there for `look_from_elsewhere`.
    """
    folders = FOLDERS.values() if lock.stem == "data" else []
    return Probe(cluster, Surroundings, probe_job(template, ["python", "-c", IN_POD, "leave", name, *folders]))


def look_from_elsewhere(cluster: Namespace, template: Object, name: str, first: str) -> Probe[Surroundings]:
    """Start a probe that looks for what another probe left under `name`, and removes it.

    first: a node on which it must not run; "" for none.
    """
    command = ["python", "-c", IN_POD, "find", name, *FOLDERS.values()]
    return Probe(cluster, Surroundings, probe_job(template, command, elsewhere_than=first))


def train_together(
    cluster: Namespace, templates: dict[str, Object], needs: list[Need], gpus: int
) -> Probe[TrialTraining]:
    """Start a few seconds of training with as many nodes and processes as the largest run has.

    gpus: the most GPUs on one node of the cluster; with 0 it trains on the CPU, over gloo.
    """
    largest = max(needs, key=lambda need: need.nodes * need.processes, default=None)
    wanted, nodes = (largest.gpus, largest.nodes) if largest else (0, 1)
    processes = min(wanted, gpus) or (largest.processes if largest else 2)
    on_gpus = bool(wanted and gpus)
    resources = {"cpu": "500m", "memory": f"{1 + processes}Gi", "ephemeral-storage": "1Gi"}
    if on_gpus:
        resources[gpu_resource(templates["gpu"])] = str(processes)
    # Kubernetes fills in $(…) from the container's own variables.
    meeting = [f"--nnodes={nodes}", f"--node-rank=$({NODE})", f"--master-addr=$({NODE_0})", f"--master-port={PORT}"]
    torchrun = ["torch.distributed.run", *(meeting if nodes > 1 else ["--standalone"])]
    command = ["python", "-m", *torchrun, f"--nproc-per-node={processes}", "--no-python", "python", "-c", DDP_TRIAL]
    device, template = (["cuda"], templates["gpu"]) if on_gpus else ([], templates["train"])
    return Probe(cluster, TrialTraining, probe_job(template, [*command, *device], resources, nodes=nodes))


UNWRITABLE = (
    "chown the folder to 1000:1000 if its volume ignores fsGroup (hostPath, NFS), or set fsGroup in the pod templates"
)

LOCKED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)\s*(?:;\s*([^\\]+))?", re.MULTILINE)
"""A package in a lock file: its name, version and marker."""

LARGEST_SKEW = 30.0
"""Seconds between a node's clock and the API server's; beyond them, times of files and tokens mislead."""

NEW_DRIVER = "the image's CUDA 13 needs NVIDIA driver 580 or newer on the node: update it"
HINTS = {
    "No space left on device": "raise the sizeLimit of the volume shm in the pod template",
    "shared memory": "raise the sizeLimit of the volume shm in the pod template",
    "driver version is insufficient": NEW_DRIVER,
    "driver on your system is too old": NEW_DRIVER,
    "more memory than its limit": "the trial exceeded its memory limit, or the node ran out of memory: look at the "
    "node's other pods",
    "the pod sees": "the GPU device plugin gave fewer GPUs than requested: look at its pods",
}
"""What to do, by words of a training's failure."""


def check_inside(answer: Answer[Surroundings], lock: Path) -> Iterator[Finding]:
    """Turn the answer of an image's probe into checks of the image, the volumes and the clocks."""
    report = answer.report
    if report is None:
        step = "push the image to the nodes' registry, and set its name in the overlay under images:"
        yield Finding(f"image {lock.stem}", "fail", f"{answer.image}: {answer.fault}", step)
        return
    yield check_image(answer.image, report.python, report.packages, lock)
    for folder, errors in report.folders.items():
        yield check_folder(f"volume {folder}", errors, report.user, UNWRITABLE)
    if report.folders:
        yield check_clock(report.time, answer)


def check_image(image: str, python: str, packages: dict[str, str | None], lock: Path) -> Finding:
    """Check the packages of an image against a lock file. packages: versions by name, as its pod reported them."""
    present: dict[str, str | None] = {canonicalize_name(name): version for name, version in packages.items()}
    locked = locked_versions(lock, python)
    others = {name: version for name, version in locked.items() if present.get(name) != version}
    if wrong := [f"{name} {present.get(name, 'missing')} instead of {version}" for name, version in others.items()]:
        few = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        step = f"rebuild the image (docker build --target {lock.stem}) with a new tag, and set it in the overlay"
        return Finding(f"image {lock.stem}", "fail", f"{image} was built from another envs/{lock.name}: {few}", step)
    return Finding(f"image {lock.stem}", "ok", f"{image}: its {len(locked)} packages match envs/{lock.name}")


def locked_versions(lock: Path, python: str) -> dict[str, str]:
    """Return name and version of every package in a lock file, for a version of Python ("3.12.1")."""
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        canonicalize_name(name): version
        for name, version, marker in LOCKED.findall(lock.read_text())
        if not marker or Marker(marker.strip()).evaluate(environment)
    }


def check_clock(told: float, answer: Answer[Any]) -> Finding:
    """Compare a pod's clock with the API server's, read before and after the pod ran.

    told: the time by the pod's clock, in seconds since 1970.
    """
    assert answer.made is not None, "a probe that reported something was made"
    assert answer.ended is not None, "and it ended"
    # The API server's Date has whole seconds.
    early, late = answer.made.timestamp() - told, told - (answer.ended.timestamp() + 1)
    skew = max(early, late, 0.0)
    if skew > LARGEST_SKEW:
        step = "synchronize the clocks of the nodes and of the control plane by NTP"
        return Finding("clocks", "fail", f"a pod's clock differs by {skew:.0f} s from the API server's", step)
    return Finding("clocks", "ok", f"pods and API server agree within {max(1.0, skew):.0f} s")


def check_from_elsewhere(answer: Answer[Surroundings], first: str) -> Finding:
    """Check that a probe on another node than `first` saw the files that were written on `first`."""
    row = "volumes, two nodes"
    if answer.report is None:
        step = "nothing, if the cluster has a single node; else find out why the pod did not run"
        return Finding(row, "warn", f"not checked from another node than {first}: {answer.fault}", step)
    unseen = [f"{folder}: {errors['see']}" for folder, errors in answer.report.folders.items() if errors]
    if unseen:
        step = "the claims must be on a shared file system (ReadWriteMany); a hostPath is local to each node"
        return Finding(row, "fail", f"{answer.node} does not see what {first} wrote: {'; '.join(unseen)}", step)
    return Finding(row, "ok", f"{answer.node} sees what {first} wrote")


def check_training(answer: Answer[TrialTraining]) -> Finding:
    """Turn the answer of `train_together` into a check."""
    trial = answer.report
    if trial is None or trial.wrong:
        fault = trial.wrong if trial else answer.fault
        hints = (hint for words, hint in HINTS.items() if words in fault)
        return Finding("training together", "fail", fault, next(hints, "see docs/troubles.md, Training together"))
    detail = (
        f"{trial.processes} processes on {trial.device} over {trial.backend}: "
        f"{trial.gigabytes_per_second:.1f} GB/s between them, /dev/shm of {trial.shared_memory_mb:,} MB"
    )
    if trial.nodes > 1:
        within = f"{trial.within_node:.1f} GB/s within a node, " if trial.within_node else ""
        detail = f"{trial.nodes} nodes, {detail}; {within}{trial.between_nodes:.1f} GB/s between nodes"
    return Finding("training together", "ok", detail)
