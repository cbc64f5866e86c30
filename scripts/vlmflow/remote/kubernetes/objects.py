"""RBAC: the executor's rights, one list for the controller's Role, the doctor and the tests.

Checks of the objects that `kubectl apply -k` makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.cluster.group_kinds import KINDS
from vlmflow.remote.cluster.pods import CONTAINER, NAMES, TemplatesFound
from vlmflow.remote.findings import Finding


@dataclass(frozen=True)
class Right:
    """One verb on one resource. purpose: what fails without it. instead: a right that serves as well."""

    group: str
    resource: str
    verb: str
    purpose: str
    instead: "Right | None" = None

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


POD_TEMPLATES = Right("", "podtemplates", "list", "reading the pod templates of older overlays")
"""For this release alone: the Role grants it, and nothing fails without it if the overlay made CronJobs."""

EXECUTOR = (
    Right("batch", "cronjobs", "list", "reading the pod templates", instead=POD_TEMPLATES),
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


def missing(api: Api, rights: tuple[Right, ...]) -> list[Right]:
    """Return the rights that the API's user lacks (SelfSubjectAccessReview)."""
    return [right for right in rights if not _may(api, right) and not (right.instead and _may(api, right.instead))]


def check_rights(api: Api, who: str, rights: tuple[Right, ...]) -> list[Finding]:
    """Check the executor's rights. who: whose they are, for the table. rights: those that they should have."""
    lacking = missing(api, rights)
    found = f"all {len(rights)} that the executor uses"
    if lacking:
        words = ", ".join(f"{right} ({right.purpose})" for right in lacking)
        step = (
            "controller: kubectl apply -k k8s/overlays/NAME makes its Role, with a component for cluster.multi_node "
            "(docs/kubernetes.md, Which object); others: ask the namespace's administrator"
        )
        return [Finding(f"rights, {who}", "fail", f"missing: {words}", step)]
    if missing(api, (NODES,)):
        found += "; no right to list nodes: why a pod waits is shown without amounts (k8s/components/see-nodes)"
    return [Finding(f"rights, {who}", "ok", found)]


def check_job_service_account(api: Api) -> Finding:
    """Check that jobs' pods have none of the rights. api: calls with their account."""
    groups = [right for rights in GROUPS.values() for right in rights]
    present = [right for right in (*EXECUTOR, *STORAGE_KEYS, *groups, POD_TEMPLATES) if _may(api, right)]
    if present:
        return Finding(
            "rights, job pods",
            "fail",
            "too many: " + ", ".join(map(str, present)),
            "remove the role bindings of service account vlmflow-job",
        )
    return Finding("rights, job pods", "ok", "none")


def _may(api: Api, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "namespace": "" if right == NODES else api.namespace,
                "group": right.group,
                "resource": resource,
                "subresource": subresource,
                "verb": right.verb,
            }
        },
    }
    answer: Object = api.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    allowed: bool = answer["status"]["allowed"]
    return allowed


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
