"""The pod templates of a namespace: suspended CronJobs, which never start anything by themselves.

This release also reads PodTemplates, which older overlays made; a CronJob of the same name takes precedence.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.client import Refused
from vlmflow.remote.cluster.instance import selector, short

CRON_JOBS, POD_TEMPLATES = "batch/v1/cronjobs", "podtemplates"

NAMES = ("default", "fetch", "gpu", "train")
"""The templates that every namespace must have; an overlay may have more, as `answer` and `search`, for few runs."""

CONTAINER = "snakemake"
"""The container of a template that runs the rule; the executor plugin uses this name."""

GPU_RESOURCE = "vlmflow/gpu-resource"
"""The annotation with the cluster's resource name of GPUs; default nvidia.com/gpu."""

MIGRATION = "k8s/README.md, From PodTemplates to CronJobs"


@dataclass(frozen=True)
class TemplatesFound:
    """The pod templates of a namespace.

    templates: each as {metadata, template}, with its name in k8s/templates, which rules use.
    old: names of those that are PodTemplates. unread: names of PodTemplates that also exist as CronJobs.
    """

    templates: list[Object]
    old: list[str]
    unread: list[str]

    def warning(self) -> str:
        """Return which PodTemplates remain; "" if none."""
        said = []
        if self.old:
            said.append(f"PodTemplates, which the next release will not read: {', '.join(self.old)}")
        if self.unread:
            said.append(f"PodTemplates that are ignored, since CronJobs have their names: {', '.join(self.unread)}")
        return "; ".join(said)

    def next_step(self) -> str:
        """Return what to do about remaining PodTemplates."""
        apply = f"apply the overlay, which makes CronJobs ({MIGRATION}), then " if self.old else ""
        return f"{apply}run `kubectl delete podtemplates -n NAMESPACE -l '{selector()}'`"


def pod_templates(objects: Callable[[str], list[Object]]) -> TemplatesFound:
    """Return the pod templates of a namespace.

    objects: lists the objects of a kind; may raise Refused.

    A kind that the user may not list counts as empty: ClusterRole `admin` does not allow PodTemplates
    (https://kubernetes.io/docs/reference/access-authn-authz/rbac/#user-facing-roles), the Role of older overlays does
    not allow CronJobs. Raises the refusal of CronJobs if there are no PodTemplates either; any other failure at once.
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
    """Return the template in a suspended CronJob, as {metadata, template}; None if it is not suspended."""
    spec = cron_job["spec"]
    if not spec.get("suspend"):
        return None
    return {"metadata": cron_job["metadata"], "template": spec["jobTemplate"]["spec"]["template"]}


def _named(name: str, template: Object) -> Object:
    return template | {"metadata": template["metadata"] | {"name": name}}
