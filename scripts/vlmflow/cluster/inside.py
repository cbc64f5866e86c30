"""What probes find inside the cluster, as checks: images, volumes, clocks, and processes that train together."""

from pathlib import Path

from vlmflow.cluster.api import Api, Object
from vlmflow.cluster.checks import Check
from vlmflow.cluster.needs import Need, gpu_resource
from vlmflow.cluster.pins import check_image
from vlmflow.cluster.probe import Answer, Probe

HERE = Path(__file__).parent
FOLDERS = {"cache": "/cache", "outputs": "/outputs"}
"""Claims, and where pods have them."""

LARGEST_SKEW = 30.0
"""Seconds between a node's clock and the API server's: beyond it times of files and tokens mislead."""

SMALL = {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "256Mi"}

HINTS = {
    "No space left on device": "raise the sizeLimit of the volume shm in the pod template",
    "shared memory": "raise the sizeLimit of the volume shm in the pod template",
    "driver version is insufficient": "the node's NVIDIA driver is older than the image's CUDA: update it",
    "OOMKilled": "the node gave less memory than asked for; look at its other pods",
    "the pod sees": "the GPU device plugin gave fewer than asked for: look at its pods",
}


def look_inside(api: Api, image: Object, lock: Path) -> Probe:
    """Begin a probe of a template's image; only the data image's also tries the volumes."""
    folders = FOLDERS.values() if lock.stem == "data" else []
    return Probe(api, image, ["python", "-c", (HERE / "in_pod.py").read_text(), *folders], SMALL)


def train_together(api: Api, templates: dict[str, Object], needs: list[Need], gpus: int) -> Probe:
    """Begin a few seconds of training over as many processes as the largest run has.

    gpus: the most GPUs that a node of the cluster has; with none it trains on the CPU, over gloo.
    """
    wanted = max((need.gpus for need in needs), default=0)
    processes = min(wanted, gpus) or max((need.processes for need in needs), default=2)
    resources = {"cpu": "500m", "memory": f"{1 + processes}Gi", "ephemeral-storage": "1Gi"}
    template = templates["gpu" if wanted and gpus else "train"]
    if wanted and gpus:
        resources[gpu_resource(templates["gpu"])] = str(processes)
    command = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python"]
    device = ["cuda"] if wanted and gpus else []
    return Probe(api, template, [*command, "python", "-c", (HERE / "ddp_check.py").read_text(), *device], resources)


def check_inside(answer: Answer, lock: Path) -> list[Check]:
    """Check what a probe of an image found."""
    what = f"image {lock.stem}"
    if not answer.said:
        step = "bring the image to the nodes' registry, and set its name in the overlay's images:"
        return [Check(what, "fail", f"{answer.image}: {answer.fault}", step)]
    said = answer.said
    checks = [check_image(answer.image, said["python"], said["packages"], lock)]
    for folder, fault in said["folders"].items():
        checks.append(_writable(folder, fault, said["user"]))
    if said["folders"]:
        checks.append(check_clock(answer))
    return checks


def _writable(folder: str, fault: str, user: int) -> Check:
    if fault:
        step = (
            "volumes that take no notice of fsGroup (hostPath, NFS): chown the folder to 1000:1000; others: set "
            "fsGroup in the pod templates"
        )
        return Check(f"volume {folder}", "fail", f"user {user} cannot write: {fault}", step)
    return Check(f"volume {folder}", "ok", f"writable as user {user}")


def check_clock(answer: Answer) -> Check:
    """Compare a pod's clock with the API server's, which saw the pod before and after."""
    told = answer.said["time"]
    # The API server's Date has whole seconds.
    early, late = answer.made.timestamp() - told, told - (answer.ended.timestamp() + 1)
    skew = max(early, late, 0.0)
    if skew > LARGEST_SKEW:
        step = "set the clocks of the nodes and of the control plane by NTP"
        return Check("clocks", "fail", f"a pod's clock is {skew:.0f} s away from the API server's", step)
    return Check("clocks", "ok", f"pods and API server agree within {max(1.0, skew):.0f} s")


def check_training(answer: Answer) -> Check:
    """Check what the processes that trained together found."""
    wrong = answer.fault or answer.said.get("wrong", "")
    if wrong:
        step = next(
            (hint for words, hint in HINTS.items() if words in wrong), "see docs/troubles.md, Training together"
        )
        return Check("training together", "fail", wrong, step)
    said = answer.said
    found = (
        f"{said['processes']} processes on {said['device']} over {said['backend']}: "
        f"{said['gigabytes_per_second']:.1f} GB/s between them, /dev/shm of {said['shared_memory_mb']:,} MB"
    )
    return Check("training together", "ok", found)
