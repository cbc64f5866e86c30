"""RBAC: the executor's rights, one list for the controller's Role, the doctor and the tests."""

from dataclasses import dataclass

from vlmflow.remote.cluster.api import Api, Object
from vlmflow.remote.cluster.group_kinds import KINDS
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
