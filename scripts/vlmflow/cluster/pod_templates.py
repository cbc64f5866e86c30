"""The pod templates of a namespace: what its suspended CronJobs hold, from which nothing is ever started.

This release reads PodTemplates too, which older overlays made; CronJobs win over those of the same name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vlmflow.cluster.api import Object
from vlmflow.cluster.client import Refused
from vlmflow.cluster.instance import selector, short

CRON_JOBS, POD_TEMPLATES = "batch/v1/cronjobs", "podtemplates"

NAMES = ("default", "fetch", "gpu", "train")
"""Those that rules ask for; an overlay may have more."""

CONTAINER = "snakemake"
"""The container of a template that runs the rule: the name that the executor plugin gives it."""

GPU_RESOURCE = "vlmflow/gpu-resource"
"""The annotation with the cluster's name for its GPUs; nvidia.com/gpu without it."""

MIGRATION = "k8s/README.md, From PodTemplates to CronJobs"


@dataclass(frozen=True)
class TemplatesFound:
    """What a namespace has.

    templates: each as {metadata, template}, under the name by which rules ask for it (that of k8s/templates).
    old: names of those that are PodTemplates. unread: names of PodTemplates that are CronJobs too.
    """

    templates: list[Object]
    old: list[str]
    unread: list[str]

    def warning(self) -> str:
        """Say which PodTemplates are left; nothing where none is."""
        said = []
        if self.old:
            said.append(f"PodTemplates, which the next release will not read: {', '.join(self.old)}")
        if self.unread:
            said.append(f"PodTemplates that are not read, since CronJobs have their names: {', '.join(self.unread)}")
        return "; ".join(said)

    def next_step(self) -> str:
        """Say what to do about PodTemplates that are left."""
        apply = f"apply the overlay, which makes CronJobs ({MIGRATION}), then " if self.old else ""
        return f"{apply}`kubectl delete podtemplates -n NAMESPACE -l '{selector()}'`"


def pod_templates(objects: Callable[[str], list[Object]]) -> TemplatesFound:
    """Give the pod templates of a namespace.

    objects: lists the objects of a kind; raises Refused.

    A kind that may not be listed counts as one of which there is none: PodTemplates may not with ClusterRole `admin`
    (https://kubernetes.io/docs/reference/access-authn-authz/rbac/#user-facing-roles), CronJobs not with the Role of
    older overlays. Raises the refusal of CronJobs where there are no PodTemplates either; any other failure at once.
    """
    refused = None
    try:
        current = [held for each in objects(CRON_JOBS) if (held := template_in(each))]
    except Refused as error:
        if error.status != 403:
            raise
        current, refused = [], error
    try:
        old = objects(POD_TEMPLATES)
    except Refused as error:
        if error.status != 403:
            raise
        old = []
    if refused and not old:
        raise refused
    templates = {short(each["metadata"]["name"]): each for each in current}
    old_ones = {short(each["metadata"]["name"]): each for each in old}
    return TemplatesFound(
        templates=[_named(name, each) for name, each in (old_ones | templates).items()],
        old=sorted(old_ones.keys() - templates.keys()),
        unread=sorted(old_ones.keys() & templates.keys()),
    )


def template_in(cron_job: Object) -> Object | None:
    """Give the template that a suspended CronJob holds, as {metadata, template}; None for one that is to run."""
    spec = cron_job["spec"]
    if not spec.get("suspend"):
        return None
    return {"metadata": cron_job["metadata"], "template": spec["jobTemplate"]["spec"]["template"]}


def container_of(template: Object) -> Object | None:
    """Give the container of a pod template that runs the rule; None where it has none."""
    containers = template["template"]["spec"].get("containers") or []
    return next((container for container in containers if container["name"] == CONTAINER), None)


def _named(name: str, template: Object) -> Object:
    return template | {"metadata": template["metadata"] | {"name": name}}
