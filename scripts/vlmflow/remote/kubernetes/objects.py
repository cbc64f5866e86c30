"""Checks of what a namespace has: the objects that `kubectl apply -k` makes, and the rights of accounts (RBAC).

The executor's rights are one list for the controller's Role, the doctor and the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.cluster.groups import CONTAINER, KINDS, IndexedJob, check_served
from vlmflow.remote.doctor import Finding
from vlmflow.remote.kubernetes.templates import NAMES, STATE_CLAIM
from vlmflow.remote.library import VlmflowError

APPLY = "kubectl apply -k k8s/overlays/NAME"
OLDEST = (1, 25)
"""The first minor version of Kubernetes whose Pod Security admission is stable."""


@dataclass(frozen=True)
class Right:
    """One verb on one resource. purpose: what fails without it."""

    group: str
    resource: str
    verb: str
    purpose: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


EXECUTOR = (
    Right("batch", "cronjobs", "list", "reading the pod templates"),
    Right("batch", "jobs", "create", "starting a job"),
    Right("batch", "jobs", "list", "the state of jobs, also those of an earlier Snakemake"),
    Right("batch", "jobs", "delete", "removing ended or interrupted jobs"),
    Right("", "services", "create", "the names by which the pods of one training find each other"),
    Right("", "pods", "list", "the state of pods, and why they wait"),
    Right("", "pods", "delete", "removing the pods of a deleted Job"),
    Right("", "pods/log", "get", "progress, and the output of a failed job"),
    Right("", "events", "list", "why a pod waits"),
)

STORAGE_KEYS = (
    Right("", "secrets", "create", "giving storage credentials to pods"),
    Right("", "secrets", "delete", "removing them afterwards"),
)
"""What the executor also needs with targets in S3: never in the controller, whose targets are on a volume."""

GROUPS = {
    kind.name: tuple(
        Right(kind.api.partition("/")[0], resource, verb, purpose)
        for resource in kind.plurals
        for verb, purpose in (
            ("create", "starting a training on several nodes"),
            ("list", "its state, and what an earlier Snakemake left"),
            ("delete", "removing it"),
        )
    )
    for kind in KINDS.values()
}
"""What the executor also needs, by `cluster.multi_node`."""

NODES = Right("", "nodes", "list", "which node lacks what; cluster-wide")


def check_rights(api: Api, who: str, rights: tuple[Right, ...]) -> Finding:
    """Check the executor's rights. who: whose they are, for the table. rights: those that they should have."""
    lacking = missing(api, rights)
    detail = f"all {len(rights)} that the executor uses"
    if lacking:
        words = ", ".join(f"{right} ({right.purpose})" for right in lacking)
        step = (
            "controller: kubectl apply -k k8s/overlays/NAME makes its Role, with a component for cluster.multi_node "
            "(docs/kubernetes.md, Which object); others: ask the namespace's administrator"
        )
        return Finding(f"rights, {who}", "fail", f"missing: {words}", step)
    if missing(api, (NODES,)):
        detail += "; no right to list nodes: why a pod waits is shown without amounts (k8s/components/see-nodes)"
    return Finding(f"rights, {who}", "ok", detail)


def check_job_service_account(api: Api) -> Finding:
    """Check that jobs' pods have none of the rights. api: calls with their account."""
    rights = (*EXECUTOR, *STORAGE_KEYS, *(right for rights in GROUPS.values() for right in rights))
    lacking = missing(api, rights)
    if present := [right for right in rights if right not in lacking]:
        detail = "too many: " + ", ".join(map(str, present))
        return Finding("rights, job pods", "fail", detail, "remove the role bindings of service account vlmflow-job")
    return Finding("rights, job pods", "ok", "none")


def missing(api: Api, rights: tuple[Right, ...]) -> list[Right]:
    """Return the rights that the API's user lacks (SelfSubjectAccessReview)."""
    lacking = []
    for right in rights:
        resource, _, subresource = right.resource.partition("/")
        attributes = {"group": right.group, "resource": resource, "subresource": subresource, "verb": right.verb}
        attributes["namespace"] = "" if right == NODES else api.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = api.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        if not answer["status"]["allowed"]:
            lacking.append(right)
    return lacking


def check_version(version: Mapping[str, str]) -> Finding:
    """Check the API server's version. version: the answer of /version."""
    if (int(version["major"]), int(version["minor"].rstrip("+"))) < OLDEST:
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


def check_several_nodes(api: Api, kind: IndexedJob) -> list[Finding]:
    """Check that the cluster serves the objects that a training on several nodes is made of."""
    try:
        check_served(api, kind)
    except VlmflowError as error:
        return [Finding("several nodes", "fail", error.cause, error.next_step)]
    return [Finding("several nodes", "ok", f"the cluster serves {kind.name}")] if kind.plurals else []


def check_claim(claim: Object | None, name: str) -> Finding:
    """Check that a claim is bound, and that pods on several nodes can use its volume."""
    row = f"claim {name}"
    if claim is None:
        return Finding(row, "fail", "it does not exist", APPLY)
    phase = claim["status"].get("phase", "Pending")
    storage_class = claim["spec"].get("storageClassName", "the default storage class")
    if phase != "Bound":
        step = f"kubectl describe pvc {name} says why; storage class and size are set in the overlay"
        return Finding(row, "fail", f"{phase}, storage class: {storage_class}", step)
    modes = claim["status"].get("accessModes") or []
    detail = f"{claim['status'].get('capacity', {}).get('storage', '?')}, {', '.join(modes)}, {storage_class}"
    if "ReadWriteMany" not in modes:
        step = "all pods must run on one node: see docs/kubernetes.md, Volumes; or use a class with ReadWriteMany"
        return Finding(row, "warn", detail, step)
    return Finding(row, "ok", detail)


def check_templates(templates: dict[str, Object]) -> Finding:
    """Check that the pod templates exist, with the container that runs the rule. templates: by name."""
    faults = [f"{name} does not exist" for name in NAMES if name not in templates]
    for name, template in sorted(templates.items()):
        containers = template["template"]["spec"].get("containers") or []
        if not any(container["name"] == CONTAINER for container in containers):
            faults.append(f"{name} has no container named {CONTAINER}")
    if faults:
        return Finding("pod templates", "fail", "; ".join(faults), f"fix k8s/templates; {APPLY}")
    return Finding("pod templates", "ok", ", ".join(sorted(templates)))


def check_secret(secret: Object | None, hub_sources: list[str]) -> Finding:
    """Check the Secret with the hub's token by its keys alone. hub_sources: what the configuration fetches there."""
    if not hub_sources:
        return Finding("hub token", "ok", "not needed: no source of the configuration is on the hub")
    if secret is None:
        step = "only gated sources need it: write HF_TOKEN=… into .env, then run vlmflow cluster token"
        return Finding("hub token", "warn", "no Secret hf-token", step)
    if not (secret.get("data") or {}).get("HF_TOKEN"):
        return Finding("hub token", "fail", "Secret hf-token has no key HF_TOKEN", "run vlmflow cluster token")
    return Finding("hub token", "ok", "Secret hf-token, for pods of the template fetch")


def check_controller(deployment: Object | None) -> Finding:
    """Check that the controller's pod runs, and that jobs cannot write what it executes."""
    if deployment is None:
        detail = "none: Snakemake runs elsewhere, with targets in S3"
        return Finding("controller", "warn", detail, "see docs/kubernetes.md")
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or []
    if not any(STATE_CLAIM in volume.get("persistentVolumeClaim", {}).get("claimName", "") for volume in volumes):
        detail = f"an older version, without the claim {STATE_CLAIM}: jobs can write what it executes"
        return Finding("controller", "fail", detail, "see docs/kubernetes.md, Upgrade")
    if not deployment["status"].get("availableReplicas"):
        words = [condition["message"] for condition in deployment["status"].get("conditions", [])]
        step = "kubectl describe pod --selector app.kubernetes.io/name=controller"
        return Finding("controller", "fail", "not running: " + " ".join(words), step)
    return Finding("controller", "ok", "running")
