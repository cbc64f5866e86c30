"""The client of the API server against a real HTTP server that fails on demand, and the pod templates it lists."""

import ssl
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bad_minutes import BadMinutes, kubeconfig_of, refusal, serving_by_default
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import LOG_KEPT, LOG_READ, Api, Refused, connect
from vlmflow.remote.kubernetes.templates import templates_of

JOBS = "batch/v1/jobs"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadMinutes]:
    with serving_by_default(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def api(server: BadMinutes, said: list[str]) -> Api:
    return Api(connect(said.append, patience=30), "here")


def test_it_tries_again_what_fails_for_now(api: Api, server: BadMinutes) -> None:
    server.answers = [
        refusal(500, "InternalError"),
        (None, {}, {}),
        (429, {}, {"Retry-After": "0"}),
        (200, {"items": [{"metadata": {"name": "j"}}]}, {}),
    ]
    assert api.list(JOBS, "a=b") == [{"metadata": {"name": "j"}}]
    assert server.asked == ["GET /apis/batch/v1/namespaces/here/jobs?labelSelector=a%3Db"] * 4


@pytest.mark.parametrize("answer", [[], {}, {"items": 3}, {"items": None}])
def test_an_answer_of_another_form_is_refused(api: Api, server: BadMinutes, answer: object) -> None:
    server.answers = [(200, answer, {"Date": "Mon, 23 Nov 99999 00:00:00 -0000"})]
    with pytest.raises(Refused, match=r"the answer to GET .*/jobs is no list of objects"):
        api.list(JOBS)


def test_it_reports_and_gives_up_when_its_patience_ends(api: Api, server: BadMinutes, said: list[str]) -> None:
    api.client.rest_client._patience = 3.0
    server.answers = [refusal(503, "ServiceUnavailable")] * 50
    with pytest.raises(Refused) as failed:
        api.list(JOBS)
    assert str(failed.value) == "said ServiceUnavailable (503)"
    assert "The API server fails (503" in said[0]


def test_an_absent_server(server: BadMinutes, api: Api) -> None:
    api.client.rest_client._patience = 0.5
    server.socket.close()
    with pytest.raises(Refused, match="no answer from the API server: ") as refused:
        api.list(JOBS)
    assert refused.value.status == 0


def test_it_does_not_repeat_what_is_refused_for_good(api: Api, server: BadMinutes) -> None:
    server.answers = [refusal(422, "Invalid")]
    with pytest.raises(Refused, match="422"):
        api.create(JOBS, {"metadata": {"name": "j"}})
    assert len(server.asked) == 1


def test_a_create_whose_answer_was_lost_is_done_once(api: Api, server: BadMinutes) -> None:
    server.answers = [(None, {}, {}), refusal(409, "AlreadyExists")]
    api.create(JOBS, {"metadata": {"name": "j"}})
    assert len(server.asked) == 2


def test_a_create_with_a_quota_conflict_is_retried(api: Api, server: BadMinutes) -> None:
    server.answers = [refusal(409, "Conflict"), refusal(409, "Conflict"), (201, {"kind": "Job"}, {})]
    api.create(JOBS, {"metadata": {"name": "j"}})
    assert server.asked == ["POST /apis/batch/v1/namespaces/here/jobs"] * 3


def test_deleting_what_is_gone_is_fine(api: Api, server: BadMinutes) -> None:
    server.answers = [refusal(404, "NotFound")]
    api.delete(JOBS, "j")


def test_a_server_that_wakes_up_may_refuse_for_a_moment(api: Api, server: BadMinutes) -> None:
    server.answers = [(None, {}, {}), refusal(403, "Forbidden"), (200, {"items": []}, {})]
    assert api.list(JOBS) == []
    server.answers = [refusal(403, "Forbidden")]
    api.client.rest_client._well_since = 0.0
    with pytest.raises(Refused, match="403"):
        api.list(JOBS)


def test_the_end_of_a_log_of_any_size_is_kept(api: Api, server: BadMinutes) -> None:
    server.answers = [(200, "x" * 3_000_000 + "the end", {})]
    log = api.log("p", "snakemake", 5)
    assert len(log) == LOG_KEPT
    assert log.endswith('xthe end"')
    assert f"limitBytes={LOG_READ}" in server.asked[0]


def test_without_any_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(VlmflowError, match="KUBECONFIG"):
        connect(print)


def test_the_time_is_the_servers(api: Api, server: BadMinutes) -> None:
    server.ahead = 400.0
    api.list(JOBS)
    ahead = (api.now() - datetime.now(UTC)).total_seconds()
    assert 398 < ahead < 402


def test_a_proxys_page_is_a_failure(api: Api, server: BadMinutes) -> None:
    server.answers = [(200, b"<html>", {})]
    with pytest.raises(Refused, match=r"the answer to GET /api/v1/namespaces/here/pods is not JSON .*<html>"):
        api.list("pods")


def test_an_object_that_is_not_there_is_none(api: Api, server: BadMinutes) -> None:
    server.answers = [refusal(404, "NotFound"), refusal(403, "Forbidden")]
    assert api.get("secrets", "hf-token") is None
    with pytest.raises(Refused, match=r"^said Forbidden \(403\)$"):
        api.get("secrets", "hf-token")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    file = tmp_path / "own.pem"
    key = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words = ["openssl", "req", *key, "-subj", "/CN=localhost", "-keyout", file, "-out", tmp_path / "cert"]
    subprocess.run(words, check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "cert").read_bytes())
    return file


def test_an_unknown_certificate_is_not_retried(server: BadMinutes, api: Api, certificate: Path, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    kubeconfig_of(f"https://localhost:{server.server_address[1]}", tmp_path / "kubeconfig")
    begun = time.monotonic()
    with pytest.raises(Refused, match="CERTIFICATE_VERIFY_FAILED") as refused:
        Api(connect(print, patience=30), "here").list("pods")
    assert (refused.value.status, refused.value.for_now) == (0, False)
    assert time.monotonic() - begun < 20


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
