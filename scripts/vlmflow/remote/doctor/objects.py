"""Checks of the objects that `kubectl apply -k` makes."""

from collections.abc import Mapping

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.pod_templates import CONTAINER, NAMES, TemplatesFound
from vlmflow.remote.findings import Finding

APPLY = "kubectl apply -k k8s/overlays/NAME"
STATE_CLAIM = "controller-state"
"""The claim with what the controller executes: its checkout, .snakemake, the requested run. An overlay may add to this
name."""
OLDEST = (1, 25)
"""The first minor version of Kubernetes whose Pod Security admission is stable."""


def check_version(version: Mapping[str, str]) -> Finding:
    """Check the API server's version. version: the answer of /version."""
    number = (int(version["major"]), int(version["minor"].rstrip("+")))
    if number < OLDEST:
        return Finding("API server", "fail", version["gitVersion"], "use Kubernetes 1.25 or later")
    return Finding("API server", "ok", f"Kubernetes {version['gitVersion']}")


def check_namespace(namespace: Object | None, name: str) -> Finding:
    """Check that the namespace exists and that its Pod Security level is restricted."""
    if namespace is None:
        return Finding("namespace", "fail", f"namespace {name} does not exist", APPLY)
    level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "privileged")
    if level != "restricted":
        step = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=restricted; our pods need no more"
        return Finding("namespace", "warn", f"{name} enforces Pod Security level {level}", step)
    return Finding("namespace", "ok", f"{name} enforces Pod Security level restricted")


def check_claim(claim: Object | None, name: str) -> Finding:
    """Check that a claim is bound, and that pods on several nodes can use its volume."""
    if claim is None:
        return Finding(f"claim {name}", "fail", "it does not exist", APPLY)
    phase = claim["status"].get("phase", "Pending")
    wanted = claim["spec"].get("storageClassName", "the default storage class")
    if phase != "Bound":
        step = f"kubectl describe pvc {name} says why; storage class and size are set in the overlay"
        return Finding(f"claim {name}", "fail", f"{phase}, storage class: {wanted}", step)
    modes = claim["status"].get("accessModes") or []
    found = f"{claim['status'].get('capacity', {}).get('storage', '?')}, {', '.join(modes)}, {wanted}"
    if "ReadWriteMany" not in modes:
        step = "all pods must run on one node: see docs/kubernetes.md, Volumes; or use a class with ReadWriteMany"
        return Finding(f"claim {name}", "warn", found, step)
    return Finding(f"claim {name}", "ok", found)


def check_templates(found: TemplatesFound) -> Finding:
    """Check that the pod templates exist, as CronJobs, with the container that runs the rule."""
    present = {template["metadata"]["name"]: template for template in found.templates}
    faults = [f"{name} does not exist" for name in NAMES if name not in present]
    for name, template in sorted(present.items()):
        containers = template["template"]["spec"].get("containers") or []
        if not any(container["name"] == CONTAINER for container in containers):
            faults.append(f"{name} has no container named {CONTAINER}")
    if faults:
        return Finding("pod templates", "fail", "; ".join(faults), f"fix k8s/templates; {APPLY}")
    names = ", ".join(sorted(present))
    if found.warning():
        return Finding("pod templates", "warn", f"{names}; {found.warning()}", found.next_step())
    return Finding("pod templates", "ok", names)


def check_secret(secret: Object | None, hub_sources: list[str]) -> Finding:
    """Check the Secret with the hub's token by its keys alone. hub_sources: what the configuration fetches there."""
    if not hub_sources:
        return Finding("hub token", "ok", "not needed: no source of the configuration is on the hub")
    if secret is None:
        step = "only gated sources need it: write HF_TOKEN=… into .env, then run make cluster-token"
        return Finding("hub token", "warn", "no Secret hf-token", step)
    if not (secret.get("data") or {}).get("HF_TOKEN"):
        return Finding("hub token", "fail", "Secret hf-token has no key HF_TOKEN", "run make cluster-token")
    return Finding("hub token", "ok", "Secret hf-token, for pods of the template fetch")


def check_controller(deployment: Object | None) -> Finding:
    """Check that the controller's pod runs, and that jobs cannot write what it executes."""
    if deployment is None:
        return Finding(
            "controller", "warn", "none: Snakemake runs elsewhere, with targets in S3", "see docs/kubernetes.md"
        )
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or []
    if not any(STATE_CLAIM in volume.get("persistentVolumeClaim", {}).get("claimName", "") for volume in volumes):
        found = f"an older version, without the claim {STATE_CLAIM}: jobs can write what it executes"
        return Finding("controller", "fail", found, "see docs/kubernetes.md, Upgrade")
    if not deployment["status"].get("availableReplicas"):
        words = [condition["message"] for condition in deployment["status"].get("conditions", [])]
        step = "kubectl describe pod --selector app.kubernetes.io/name=controller"
        return Finding("controller", "fail", "not running: " + " ".join(words), step)
    return Finding("controller", "ok", "running")
