"""The pod templates of a namespace, from the lists of its API server."""

from collections.abc import Callable

import pytest

from vlmflow.remote.cluster.api import Refused
from vlmflow.remote.cluster.pods import CRON_JOBS, POD_TEMPLATES, pod_templates

FORBIDDEN = Refused(403, "said Forbidden", "Forbidden")


def cron_job(name: str, suspend: bool = True) -> dict:
    template = {"spec": {"containers": []}}
    return {"metadata": {"name": name}, "spec": {"suspend": suspend, "jobTemplate": {"spec": {"template": template}}}}


def old_template(name: str) -> dict:
    return {"metadata": {"name": name}, "template": {"spec": {"containers": [], "old": True}}}


def listing(cron_jobs: list[dict] | Refused, old: list[dict] | Refused) -> Callable[[str], list[dict]]:
    """Return a function that lists the objects of a kind, or refuses to."""

    def objects(kind: str) -> list[dict]:
        found = {CRON_JOBS: cron_jobs, POD_TEMPLATES: old}[kind]
        if isinstance(found, Refused):
            raise found
        return found

    return objects


@pytest.mark.parametrize("old", [FORBIDDEN, []], ids=["refused", "none there"])
def test_pod_templates_are_suspended_cron_jobs(old: list[dict] | Refused) -> None:
    found = pod_templates(listing([cron_job("gpu"), cron_job("backup", suspend=False)], old))
    assert found.templates == [{"metadata": {"name": "gpu"}, "template": {"spec": {"containers": []}}}]
    assert found.warning() == ""


@pytest.mark.parametrize("cron_jobs", [FORBIDDEN, []], ids=["refused", "none there"])
def test_pod_templates_of_an_older_overlay_are_read_with_a_warning(cron_jobs: list[dict] | Refused) -> None:
    """Its Role lets the controller list only PodTemplates."""
    found = pod_templates(listing(cron_jobs, [old_template("gpu")]))
    assert found.templates == [old_template("gpu")]
    assert found.warning() == "PodTemplates, which the next release will not read: gpu"
    assert "k8s/README.md, From PodTemplates to CronJobs" in found.next_step()


def test_a_cron_job_wins_over_a_pod_template_of_its_name() -> None:
    found = pod_templates(listing([cron_job("gpu")], [old_template("big"), old_template("gpu")]))
    are_old = {each["metadata"]["name"]: "old" in each["template"]["spec"] for each in found.templates}
    assert are_old == {"big": True, "gpu": False}
    assert "will not read: big; PodTemplates that are ignored, since CronJobs have their names: gpu" in found.warning()
    others_stay = "-l 'app.kubernetes.io/part-of=vlmflow,!app.kubernetes.io/instance'"
    assert f"kubectl delete podtemplates -n NAMESPACE {others_stay}" in found.next_step()


@pytest.mark.parametrize("old", [Refused(403, "said of the other"), []], ids=["refused", "none there"])
def test_no_visible_pod_template(old: list[dict] | Refused) -> None:
    with pytest.raises(Refused, match="said Forbidden"):
        pod_templates(listing(FORBIDDEN, old))
    assert pod_templates(listing([], old)).templates == []


@pytest.mark.parametrize("away", [0, 1])
def test_an_unreachable_server_does_not_mean_missing_templates(away: int) -> None:
    answers = [[cron_job("gpu")], [old_template("gpu")]]
    answers[away] = Refused(503, "said Unavailable")
    with pytest.raises(Refused, match="said Unavailable"):
        pod_templates(listing(*answers))
