"""Who may do what: the executor's rights, one list for the controller's Role, the doctor and the tests."""

from dataclasses import dataclass

from vlmflow.cluster.api import Api, Object
from vlmflow.doctor.findings import Check


@dataclass(frozen=True)
class Right:
    """One verb on one resource. purpose: what fails without it. instead: another that serves it as well."""

    group: str
    resource: str
    verb: str
    purpose: str
    instead: "Right | None" = None

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


POD_TEMPLATES = Right("", "podtemplates", "list", "what pods look like, as older overlays say it")
"""For this release alone: the Role grants it, and nothing fails without it where the overlay made CronJobs."""

EXECUTOR = (
    Right("batch", "cronjobs", "list", "what pods look like", instead=POD_TEMPLATES),
    Right("batch", "jobs", "create", "starting a job"),
    Right("batch", "jobs", "list", "how jobs stand, and which an earlier Snakemake left"),
    Right("batch", "jobs", "delete", "taking away what has ended or was interrupted"),
    Right("", "pods", "list", "how pods stand, and why they wait"),
    Right("", "pods", "delete", "taking away what a deleted Job leaves"),
    Right("", "pods/log", "get", "progress, and what a failed job said"),
    Right("", "events", "list", "why a pod waits"),
)

STORAGE_KEYS = (
    Right("", "secrets", "create", "handing storage credentials to pods"),
    Right("", "secrets", "delete", "taking them away again"),
)
"""What the executor does besides where targets lie in S3: never in the controller, whose targets lie on a volume."""

NODES = Right("", "nodes", "list", "how much is short where; belongs to no namespace")


def missing(api: Api, rights: tuple[Right, ...]) -> list[Right]:
    """Ask the API server which of the rights one does not have (SelfSubjectAccessReview)."""
    return [right for right in rights if not _may(api, right) and not (right.instead and _may(api, right.instead))]


def check_rights(api: Api, who: str, rights: tuple[Right, ...]) -> list[Check]:
    """Check the executor's rights. who: whose they are, for the table. rights: which they should have."""
    lacking = missing(api, rights)
    found = f"all {len(rights)} that the executor uses"
    if lacking:
        words = ", ".join(f"{right} ({right.purpose})" for right in lacking)
        step = (
            "kubectl apply -k k8s/overlays/NAME makes the controller's Role; others ask the namespace's administrator"
        )
        return [Check(f"rights, {who}", "fail", f"missing: {words}", step)]
    if missing(api, (NODES,)):
        found += "; not list nodes: a waiting pod is explained without amounts (k8s/components/see-nodes)"
    return [Check(f"rights, {who}", "ok", found)]


def check_job_account(api: Api) -> Check:
    """Check that jobs' pods have none of the rights. api: calls as their account."""
    present = [right for right in (*EXECUTOR, *STORAGE_KEYS, POD_TEMPLATES) if _may(api, right)]
    if present:
        return Check(
            "rights, job pods",
            "fail",
            "too many: " + ", ".join(map(str, present)),
            "take the role bindings of service account vlmflow-job away",
        )
    return Check("rights, job pods", "ok", "none")


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
