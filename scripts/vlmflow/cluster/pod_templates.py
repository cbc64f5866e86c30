"""The pod templates of a namespace, in either form in which overlays make them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from vlmflow.cluster.instance import selector, short

Object = dict[str, Any]

POD_TEMPLATES, CRON_JOBS = "podtemplates", "batch/v1/cronjobs"

LABEL = "app.kubernetes.io/part-of=vlmflow"
"""The selector of all that is ours in a namespace."""


def remove_one_kind() -> str:
    """Say how to remove templates that are there in both forms, of this instance alone."""
    return (
        "remove the kind that your overlay does not make: `kubectl delete podtemplates -n NAMESPACE -l "
        f"'{selector()}'`, or cronjobs"
    )


def pod_templates(objects: Callable[[str], list[Object]], refusal: type[Exception]) -> list[Object]:
    """Give the pod templates of a namespace: its PodTemplates, and what its suspended CronJobs hold.

    CronJobs, since who administers a namespace alone has no right to PodTemplates (ClusterRole `admin`,
    https://kubernetes.io/docs/reference/access-authn-authz/rbac/#user-facing-roles; k8s/transformers).

    objects: lists the objects of a kind. refusal: what that raises where it is refused, with the HTTP `status`.

    A kind that may not be listed counts as one of which there is none. Raises its refusal where nothing else is found,
    but not where PodTemplates may be listed, and there are none; any other failure at once.
    """
    found, refused = [], None
    for kind, template_of in ((CRON_JOBS, _within), (POD_TEMPLATES, _itself)):
        try:
            found += [_named_shortly(template) for each in objects(kind) if (template := template_of(each))]
            refused = None  # of CronJobs, where PodTemplates may be listed
        except refusal as error:
            if error.status != 403:
                raise
            refused = error
    if refused and not found:
        raise refused
    return found


def twice(templates: list[Object]) -> list[str]:
    """Give the names that two templates have: first one kind was applied and then the other, and both are there."""
    counts = Counter(template["metadata"]["name"] for template in templates)
    return sorted(name for name, count in counts.items() if count > 1)


def _named_shortly(template: Object) -> Object:
    """Give a template the name by which rules ask for it: that of k8s/templates, without the instance's suffix."""
    metadata = template["metadata"]
    return template | {"metadata": metadata | {"name": short(metadata["name"])}}


def _itself(template: Object) -> Object:
    return template


def _within(cron_job: Object) -> Object | None:
    spec = cron_job["spec"]
    if not spec.get("suspend"):  # one that is to run
        return None
    return {"metadata": cron_job["metadata"], "template": spec["jobTemplate"]["spec"]["template"]}
