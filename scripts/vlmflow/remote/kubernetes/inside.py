"""Checks that probes make inside the cluster: images, volumes, clocks, and processes that train together."""

import re
from pathlib import Path
from typing import Any

import msgspec
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from vlmflow.core.child_programs import NODE_0, PORT
from vlmflow.remote import folder_trials
from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.cluster.pods import NODE
from vlmflow.remote.findings import Finding, check_folder
from vlmflow.remote.kubernetes.needs import Need, gpu_resource
from vlmflow.remote.kubernetes.probe import Answer, Probe

IN_POD = Path(folder_trials.__file__).read_text()
DDP_TRIAL = Path(__file__).with_name("ddp_trial.py").read_text()
"""Programs that a pod's Python gets as text, because its image has none of our files."""

FOLDERS = {"cache": "/cache", "outputs": "/outputs"}
"""The claims, and the folders where pods mount them."""

LOCKED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)\s*(?:;\s*([^\\]+))?", re.MULTILINE)
"""A package in a lock file: its name, version and marker."""

LARGEST_SKEW = 30.0
"""Seconds between a node's clock and the API server's; beyond them, times of files and tokens mislead."""


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


UNWRITABLE = (
    "chown the folder to 1000:1000 if its volume ignores fsGroup (hostPath, NFS), or set fsGroup in the pod templates"
)

SMALL = {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "256Mi"}

NEW_DRIVER = "the image's CUDA 13 needs NVIDIA driver 580 or newer on the node: update it"
HINTS = {
    "No space left on device": "raise the sizeLimit of the volume shm in the pod template",
    "shared memory": "raise the sizeLimit of the volume shm in the pod template",
    "driver version is insufficient": NEW_DRIVER,
    "driver on your system is too old": NEW_DRIVER,
    "OOMKilled": "the trial exceeded its memory limit, or the node ran out of memory: look at the node's other pods",
    "the pod sees": "the GPU device plugin gave fewer GPUs than requested: look at its pods",
}


def look_inside(api: Api, template: Object, lock: Path, name: str) -> Probe[Surroundings]:
    """Start a probe of a template's image; only that of the data image also tries the volumes.

    name: the folder that it leaves there for `look_from_elsewhere`.
    """
    folders = FOLDERS.values() if lock.stem == "data" else []
    return Probe(api, template, _in_pod("leave", name, *folders), SMALL, Surroundings)


def look_from_elsewhere(api: Api, template: Object, name: str, first: str) -> Probe[Surroundings]:
    """Start a probe that looks for what another probe left under `name`, and removes it.

    first: a node on which it must not run; "" for none.
    """
    return Probe(api, template, _in_pod("find", name, *FOLDERS.values()), SMALL, Surroundings, elsewhere_than=first)


def _in_pod(*words: str) -> list[str]:
    return ["python", "-c", IN_POD, *words]


def train_together(api: Api, templates: dict[str, Object], needs: list[Need], gpus: int) -> Probe[TrialTraining]:
    """Start a few seconds of training with as many nodes and processes as the largest run has.

    gpus: the most GPUs on one node of the cluster; with 0 it trains on the CPU, over gloo.
    """
    largest = max(needs, key=lambda need: need.nodes * need.processes, default=None)
    wanted, nodes = (largest.gpus, largest.nodes) if largest else (0, 1)
    processes = min(wanted, gpus) or (largest.processes if largest else 2)
    resources = {"cpu": "500m", "memory": f"{1 + processes}Gi", "ephemeral-storage": "1Gi"}
    template = templates["gpu" if wanted and gpus else "train"]
    if wanted and gpus:
        resources[gpu_resource(templates["gpu"])] = str(processes)
    # Kubernetes fills in $(…) from the container's own variables.
    meeting = [f"--nnodes={nodes}", f"--node-rank=$({NODE})", f"--master-addr=$({NODE_0})", f"--master-port={PORT}"]
    torchrun = ["torch.distributed.run", *(meeting if nodes > 1 else ["--standalone"])]
    command = ["python", "-m", *torchrun, f"--nproc-per-node={processes}", "--no-python", "python", "-c", DDP_TRIAL]
    device = ["cuda"] if wanted and gpus else []
    return Probe(api, template, [*command, *device], resources, TrialTraining, nodes=nodes)


def check_inside(answer: Answer[Surroundings], lock: Path) -> list[Finding]:
    """Turn the answer of an image's probe into checks of the image, the volumes and the clocks."""
    what = f"image {lock.stem}"
    if answer.said is None:
        step = "push the image to the nodes' registry, and set its name in the overlay under images:"
        return [Finding(what, "fail", f"{answer.image}: {answer.fault}", step)]
    said = answer.said
    checks = [check_image(answer.image, said.python, said.packages, lock)]
    for folder, wrong in said.folders.items():
        checks.append(check_folder(f"volume {folder}", wrong, said.user, UNWRITABLE))
    if said.folders:
        checks.append(check_clock(said.time, answer))
    return checks


def locked_versions(lock: Path, python: str) -> dict[str, str]:
    """Return name and version of every package in a lock file, for a version of Python ("3.12.1")."""
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        canonicalize_name(name): version
        for name, version, marker in LOCKED.findall(lock.read_text())
        if not marker or Marker(marker.strip()).evaluate(environment)
    }


def check_image(image: str, python: str, packages: dict[str, str | None], lock: Path) -> Finding:
    """Check the packages of an image against a lock file. packages: versions by name, as its pod reported them."""
    present: dict[str, str | None] = {canonicalize_name(name): version for name, version in packages.items()}
    locked = locked_versions(lock, python)
    wrong = [
        f"{name} {present.get(name, 'missing')} instead of {version}"
        for name, version in locked.items()
        if present.get(name) != version
    ]
    what = f"image {lock.stem}"
    if wrong:
        few = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        step = f"rebuild the image (docker build --target {lock.stem}) with a new tag, and set it in the overlay"
        return Finding(what, "fail", f"{image} was built from another envs/{lock.name}: {few}", step)
    return Finding(what, "ok", f"{image}: its {len(locked)} packages match envs/{lock.name}")


def check_from_elsewhere(answer: Answer[Surroundings], first: str) -> Finding:
    """Check that a probe on another node than `first` saw the files that were written on `first`."""
    what = "volumes, two nodes"
    if answer.said is None:
        step = "nothing, if the cluster has a single node; else find out why the pod did not run"
        return Finding(what, "warn", f"not checked from another node than {first}: {answer.fault}", step)
    unseen = {folder: wrong["see"] for folder, wrong in answer.said.folders.items() if wrong}
    if unseen:
        words = "; ".join(f"{folder}: {error}" for folder, error in unseen.items())
        step = "the claims must be on a shared file system (ReadWriteMany); a hostPath is local to each node"
        return Finding(what, "fail", f"{answer.node} does not see what {first} wrote: {words}", step)
    return Finding(what, "ok", f"{answer.node} sees what {first} wrote")


def check_clock(told: float, answer: Answer[Any]) -> Finding:
    """Compare a pod's clock with the API server's, read before and after the pod ran.

    told: the time by the pod's clock, in seconds since 1970.
    """
    assert answer.made is not None, "a probe that said something was made"
    assert answer.ended is not None, "and it ended"
    # The API server's Date has whole seconds.
    early, late = answer.made.timestamp() - told, told - (answer.ended.timestamp() + 1)
    skew = max(early, late, 0.0)
    if skew > LARGEST_SKEW:
        step = "synchronize the clocks of the nodes and of the control plane by NTP"
        return Finding("clocks", "fail", f"a pod's clock differs by {skew:.0f} s from the API server's", step)
    return Finding("clocks", "ok", f"pods and API server agree within {max(1.0, skew):.0f} s")


def check_training(answer: Answer[TrialTraining]) -> Finding:
    """Turn the answer of `train_together` into a check."""
    said = answer.said
    if said is None or said.wrong:
        wrong = said.wrong if said else answer.fault
        step = next(
            (hint for words, hint in HINTS.items() if words in wrong), "see docs/troubles.md, Training together"
        )
        return Finding("training together", "fail", wrong, step)
    found = (
        f"{said.processes} processes on {said.device} over {said.backend}: "
        f"{said.gigabytes_per_second:.1f} GB/s between them, /dev/shm of {said.shared_memory_mb:,} MB"
    )
    if said.nodes > 1:
        within = f"{said.within_node:.1f} GB/s within a node, " if said.within_node else ""
        found = f"{said.nodes} nodes, {found}; {within}{said.between_nodes:.1f} GB/s between nodes"
    return Finding("training together", "ok", found)
