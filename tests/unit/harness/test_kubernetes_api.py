"""The client of the API server against a real HTTP server that has bad minutes."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from kubernetes.client.rest import ApiException

from harness.kubernetes.disruptions import Disruptions
from harness.kubernetes.executor import HardenedExecutor
from harness.kubernetes.job_shape import RuleJob
from harness.kubernetes.namespace import Namespace, is_refusal
from harness.kubernetes.outcome import Outcome, not_created
from harness.kubernetes.patient_watch import PatientWatch
from harness.kubernetes.watch import Watch
from vlmflow.cluster.api import LOG_KEPT, LOG_READ
from vlmflow.cluster.client import Refused, connect
from vlmflow.core.errors import VlmflowError


class BadMinutes(ThreadingHTTPServer):
    """Answers with what `answers` holds, in order, then with an empty list: a status, or None to hang up."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: list[tuple[int | None, dict, dict]] = []
        self.asked: list[str] = []
        self.ahead = 0.0


class Answer(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body, headers = self.server.answers.pop(0) if self.server.answers else (200, {"items": []}, {})
        if status is None:
            self.connection.close()
            return
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.server.ahead)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[BadMinutes]:
    with BadMinutes() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cluster(server: BadMinutes, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("vlmflow.cluster.client.FIRST_PAUSE", 0.02)
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    return Namespace("here", connect(said.append, patience=30))


def refusal(code: int, reason: str) -> tuple[int, dict, dict]:
    return code, {"kind": "Status", "reason": reason, "message": f"said {reason}"}, {}


def test_it_tries_again_what_fails_for_now(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [
        refusal(500, "InternalError"),
        (None, {}, {}),
        (429, {}, {"Retry-After": "0"}),
        (200, {"items": [{"metadata": {"name": "j"}}]}, {}),
    ]
    assert cluster.jobs("a=b") == [{"metadata": {"name": "j"}}]
    assert server.asked == ["GET /apis/batch/v1/namespaces/here/jobs?labelSelector=a%3Db"] * 4


def test_it_says_so_and_gives_up_when_its_patience_is_over(
    cluster: Namespace, server: BadMinutes, said: list[str]
) -> None:
    cluster._api.client.rest_client._patience = 3.0
    server.answers = [refusal(503, "ServiceUnavailable")] * 50
    with pytest.raises(Refused) as failed:
        cluster.jobs("")
    assert str(failed.value) == "said ServiceUnavailable (503)"
    assert "does not do its work (503" in said[0]


def test_an_absent_server(server: BadMinutes, cluster: Namespace) -> None:
    cluster._api.client.rest_client._patience = 0.5
    server.socket.close()
    with pytest.raises(Refused, match="no answer from the API server: ") as refused:
        cluster.jobs("")
    assert refused.value.status == 0


def test_it_does_not_repeat_what_is_refused_for_good(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [refusal(422, "Invalid")]
    with pytest.raises(Refused, match="422"):
        cluster.create_job({"metadata": {"name": "j"}})
    assert len(server.asked) == 1


def test_a_create_whose_answer_was_lost_is_done_once(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [(None, {}, {}), refusal(409, "AlreadyExists")]
    cluster.create_job({"metadata": {"name": "j"}})
    assert len(server.asked) == 2


def test_a_create_that_met_another_in_the_quota_is_tried_again(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [refusal(409, "Conflict"), refusal(409, "Conflict"), (201, {"kind": "Job"}, {})]
    cluster.create_job({"metadata": {"name": "j"}})
    assert server.asked == ["POST /apis/batch/v1/namespaces/here/jobs"] * 3


@pytest.fixture
def sight(cluster: Namespace, said: list[str]) -> PatientWatch:
    """Give a look at one Job."""
    watch = Watch(cluster, "", said.append)
    watch.follow("j", RuleJob("train_lora", {}), None)
    return PatientWatch(watch, said.append)


def test_an_answer_that_nobody_understands_ends_no_call(server: BadMinutes, sight: PatientWatch) -> None:
    server.answers = [(200, {"items": [{"metadata": {}}]}, {}), (200, {"kind": "Status"}, {})]
    assert sight.look(["j"]) == {}
    assert sight.look(["j"]) == {}
    assert sight.look(["j"])["j"].state == "failed"  # it is not among the Jobs that there are


def test_a_call_ends_when_the_cluster_has_refused_to_show_its_jobs_for_long(
    server: BadMinutes, sight: PatientWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [refusal(403, "Forbidden")] * 2
    assert sight.look(["j"]) == {}
    monkeypatch.setattr("harness.kubernetes.patient_watch.BLIND_SECONDS", 0.0)
    with pytest.raises(VlmflowError, match="has not shown the Jobs: said Forbidden"):
        sight.look(["j"])


def test_deleting_what_is_gone_is_fine(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [refusal(404, "NotFound")]
    cluster.delete_job("j")


def test_a_server_that_wakes_up_may_refuse_for_a_moment(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [(None, {}, {}), refusal(403, "Forbidden"), (200, {"items": []}, {})]
    assert cluster.jobs("") == []
    server.answers = [refusal(403, "Forbidden")]
    cluster._api.client.rest_client._well_since = 0.0
    with pytest.raises(Refused, match="403"):
        cluster.jobs("")


NONE = (200, {"items": []}, {})


def listed(*items: dict) -> tuple[int, dict, dict]:
    return 200, {"items": list(items)}, {}


def cron_job(name: str, suspend: bool = True) -> dict:
    template = {"spec": {"containers": []}}
    return {"metadata": {"name": name}, "spec": {"suspend": suspend, "jobTemplate": {"spec": {"template": template}}}}


def old_template(name: str) -> dict:
    return {"metadata": {"name": name}, "template": {"spec": {"containers": [], "old": True}}}


@pytest.mark.parametrize("other", [refusal(403, "Forbidden"), NONE], ids=["refused", "none there"])
def test_pod_templates_are_suspended_cron_jobs(cluster: Namespace, server: BadMinutes, other: tuple) -> None:
    server.answers = [listed(cron_job("gpu"), cron_job("backup", suspend=False)), other]
    found = cluster.pod_templates("a=b")
    assert found.templates == [{"metadata": {"name": "gpu"}, "template": {"spec": {"containers": []}}}]
    assert found.warning() == ""
    assert server.asked == [
        "GET /apis/batch/v1/namespaces/here/cronjobs?labelSelector=a%3Db",
        "GET /api/v1/namespaces/here/podtemplates?labelSelector=a%3Db",
    ]


@pytest.mark.parametrize("cron_jobs", [refusal(403, "Forbidden"), NONE], ids=["refused", "none there"])
def test_pod_templates_of_an_older_overlay_are_read_with_a_warning(
    cluster: Namespace, server: BadMinutes, cron_jobs: tuple
) -> None:
    """Its Role lets the controller list PodTemplates alone."""
    server.answers = [cron_jobs, listed(old_template("gpu"))]
    found = cluster.pod_templates("")
    assert found.templates == [old_template("gpu")]
    assert found.warning() == "PodTemplates, which the next release will not read: gpu"
    assert "k8s/README.md, From PodTemplates to CronJobs" in found.next_step()


def test_a_cron_job_wins_over_a_pod_template_of_its_name(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [listed(cron_job("gpu")), listed(old_template("big"), old_template("gpu"))]
    found = cluster.pod_templates("")
    assert {each["metadata"]["name"]: "old" in each["template"]["spec"] for each in found.templates} == {
        "big": True,
        "gpu": False,
    }
    assert "will not read: big; PodTemplates that are not read, since CronJobs have their names: gpu" in found.warning()
    others_stay = "-l 'app.kubernetes.io/part-of=vlmflow,!app.kubernetes.io/instance'"
    assert f"kubectl delete podtemplates -n NAMESPACE {others_stay}" in found.next_step()


@pytest.mark.parametrize("other", [refusal(403, "AlsoForbidden"), NONE], ids=["refused", "none there"])
def test_where_no_pod_template_is_to_be_seen(cluster: Namespace, server: BadMinutes, other: tuple) -> None:
    server.answers = [refusal(403, "Forbidden"), other]
    with pytest.raises(Refused, match="said Forbidden"):
        cluster.pod_templates("")
    server.answers = [NONE, other]
    assert cluster.pod_templates("").templates == []


def test_nodes_that_may_not_be_listed_are_asked_for_once(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [refusal(403, "Forbidden")]
    assert cluster.nodes() is None
    assert cluster.nodes() is None
    assert len(server.asked) == 1


def test_a_log_that_is_not_there_is_no_failure(cluster: Namespace, server: BadMinutes) -> None:
    for code in (400, 500):
        server.answers = [refusal(code, "BadRequest"), (200, {}, {})]
        assert cluster.log_end("p", "snakemake", 5) == ""
        server.answers.clear()
    assert len(server.asked) == 2


def test_of_a_log_of_any_size_the_end_is_kept(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [(200, "x" * 3_000_000 + "the end", {})]
    log = cluster.log_end("p", "snakemake", 5)
    assert len(log) == LOG_KEPT
    assert log.endswith('xthe end"')
    assert f"limitBytes={LOG_READ}" in server.asked[0]


def test_without_any_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(VlmflowError, match="KUBECONFIG"):
        connect(print)


def test_the_time_is_the_servers(cluster: Namespace, server: BadMinutes) -> None:
    server.ahead = 400.0
    cluster.jobs("")
    ahead = (cluster.now() - datetime.now(UTC)).total_seconds()
    assert 398 < ahead < 402


def test_a_look_before_the_executor_is_ready_finds_nothing() -> None:
    """Snakemake's thread of looks begins before __post_init__; one that ends there would never see a Job again."""
    executor = object.__new__(HardenedExecutor)

    async def look() -> list:
        return [info async for info in executor.check_active_jobs([])]

    assert asyncio.run(look()) == []


TAKEN = Outcome("failed", "p", "preempted", disrupted=True)


@pytest.fixture
def disruptions(cluster: Namespace, said: list[str]) -> Disruptions:
    """Give the budget of one Job, which has been created, and whose pauses are over at once."""
    disruptions = Disruptions(cluster, Watch(cluster, "", said.append), clock=lambda: 0.0)
    disruptions.create({"metadata": {"name": "j"}}, RuleJob("train_lora", {}), None)
    return disruptions


def test_a_job_that_is_taken_away_is_made_again_after_a_growing_pause(
    disruptions: Disruptions, server: BadMinutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(disruptions, "_clock", lambda: now)
    name, pauses = "j", []
    for number in range(2, 6):
        planned = disruptions.plan(name, TAKEN)
        assert planned.state == "waiting"
        assert "no retry is used up" in planned.why
        assert disruptions.resting(name)
        assert disruptions.create_due(name) == name
        begun = now
        while disruptions.resting(name):
            now += 0.5
            name = disruptions.create_due(name)
        assert name == f"j-{number}"
        pauses.append(now - begun)
    assert pauses == sorted(pauses)
    assert 3 <= pauses[0] <= 5 < 25 < pauses[-1] < 40
    assert server.asked == ["POST /apis/batch/v1/namespaces/here/jobs"] * 5


def test_the_budget_of_disruptions_ends_and_an_hour_of_work_renews_it(disruptions: Disruptions) -> None:
    for _ in range(20):
        assert disruptions.plan("j", TAKEN).state == "waiting"
    assert disruptions.plan("j", replace(TAKEN, ran=3600.0)).state == "waiting"
    for _ in range(19):
        assert disruptions.plan("j", TAKEN).state == "waiting"
    over = disruptions.plan("j", TAKEN)
    assert (over.state, over.again) == ("failed", False)
    assert "disruption 21 in a row" in over.why


def test_a_create_that_timed_out_is_looked_for(cluster: Namespace, server: BadMinutes, said: list[str]) -> None:
    """The Job may be there: a second one beside it would write the same targets."""
    cluster._api.client.rest_client._patience = 0.0
    watch = Watch(cluster, "", said.append)
    disruptions = Disruptions(cluster, watch)
    server.answers = [(None, {}, {})]
    disruptions.create({"metadata": {"name": "j"}}, RuleJob("train_lora", {}), None)
    there = {"metadata": {"name": "j"}, "spec": {}}
    server.answers = [(200, {"items": []}, {}), (200, {"items": [there]}, {})]
    assert watch.look(["j"])["j"].state == "waiting"
    outcome = watch.look(["j"])["j"]
    planned = disruptions.plan("j", outcome)
    assert (outcome.disrupted, planned.state) == (True, "waiting")
    assert planned.why.startswith("its Job could not be created: ")
    taken = disruptions.plan("j", TAKEN)  # it was there after all: its pod ran
    assert taken.why.startswith("preempted")


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ((422, "Invalid"), True),
        ((403, "Forbidden"), True),
        ((404, "NotFound"), True),
        ((500, "InternalError"), False),
        ((504, "Timeout"), False),
        ((429, "TooManyRequests"), False),
        ((409, "Conflict"), False),
    ],
)
def test_what_a_create_is_refused_for(
    cluster: Namespace, server: BadMinutes, said: list[str], answer: tuple, refused: bool
) -> None:
    cluster._api.client.rest_client._patience = 0.0
    server.answers = [refusal(*answer)] * 2
    with pytest.raises(Refused) if refused else nullcontext():
        disruptions = Disruptions(cluster, Watch(cluster, "", said.append))
        disruptions.create({"metadata": {"name": "j"}}, RuleJob("train_lora", {}), None)


def test_a_connection_that_broke_off_refuses_nothing() -> None:
    broken = Refused.of(ApiException(status=0, reason="SSLError: EOF occurred in violation of protocol"))
    assert not is_refusal(broken)
    assert not_created(broken).again


def test_of_what_grows_with_the_cluster_only_what_is_needed_is_read(cluster: Namespace, server: BadMinutes) -> None:
    node = {"metadata": {"name": "a"}, "status": {"allocatable": {"cpu": "4"}}}
    large = {"metadata": {"name": "a", "labels": {}}, "status": {"images": [{"names": ["x"]}], **node["status"]}}
    server.answers = [(200, {"kind": "NodeList", "items": [large]}, {})]
    assert cluster.nodes() == [node]
    pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "a", "containers": [{"resources": {}}]}, "status": {}}
    event = {"involvedObject": {"kind": "Pod", "name": "p"}, "reason": "Failed", "lastTimestamp": None}
    server.answers = [(200, {"items": [pod]}, {}), (200, {"items": [event | {"count": 3}]}, {})]
    assert cluster.holding_pods() == [pod]
    assert cluster.events() == [event]
    assert "fieldSelector=spec.nodeName%21%3D%2Cstatus.phase%21%3DSucceeded" in server.asked[-2]
    assert "fieldSelector=reason%21%3DScheduled" in server.asked[-1]


def test_an_answer_of_another_form_is_read_whole(cluster: Namespace, server: BadMinutes) -> None:
    odd = {"metadata": {"name": "a"}, "status": {"allocatable": 5}}
    server.answers = [(200, {"items": [odd]}, {})]
    assert cluster.nodes() == [odd]
