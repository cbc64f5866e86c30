"""The pod templates of a namespace, from the list of its API server."""

from pathlib import Path

import pytest

from bad_minutes import refusal, serving_by_default
from vlmflow.remote.cluster.api import Api, Refused, connect
from vlmflow.remote.kubernetes.templates import templates_of


def cron_job(name: str, suspend: bool = True) -> dict:
    template = {"spec": {"containers": []}}
    return {"metadata": {"name": name}, "spec": {"suspend": suspend, "jobTemplate": {"spec": {"template": template}}}}


@pytest.mark.parametrize("instance", ["", "ann"])
def test_pod_templates_are_suspended_cron_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    """Rules ask for them by their names in k8s/templates, also where an instance has a suffix."""
    monkeypatch.setenv("VLMFLOW_INSTANCE", instance)
    own, label = (
        (f"-{instance}", f"app.kubernetes.io/instance%3D{instance}")
        if instance
        else ("", "%21app.kubernetes.io/instance")
    )
    with serving_by_default(tmp_path, monkeypatch) as server:
        api = Api(connect(print, patience=0.0), "here")
        jobs = [cron_job(f"gpu{own}"), cron_job("big"), cron_job("backup", suspend=False)]
        server.answers = [(200, {"items": jobs}, {}), refusal(403, "Forbidden")]
        templates = templates_of(api)
        assert [template["metadata"]["name"] for template in templates] == ["gpu", "big"]
        assert templates[0]["template"] == {"spec": {"containers": []}}
        with pytest.raises(Refused, match="said Forbidden"):
            templates_of(api)
    words = f"app.kubernetes.io/part-of%3Dvlmflow%2C{label}".replace("/", "%2F")
    assert server.asked == [f"GET /apis/batch/v1/namespaces/here/cronjobs?labelSelector={words}"] * 2
