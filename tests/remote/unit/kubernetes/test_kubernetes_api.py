"""The executor with an API server that fails on demand, a real HTTP server."""

import asyncio
import locale
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kubernetes.client.rest import ApiException

from bad_minutes import BadMinutes, refusal, serving_by_default
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Refused, connect
from vlmflow.remote.job import Ended, RuleJob
from vlmflow.remote.kubernetes.executor import HardenedExecutor
from vlmflow.remote.kubernetes.namespace import Namespace, is_refusal
from vlmflow.remote.kubernetes.outcome import Outcome, not_created
from vlmflow.remote.kubernetes.watch import Disruptions, Watch


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadMinutes]:
    with serving_by_default(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cluster(server: BadMinutes, said: list[str]) -> Namespace:
    return Namespace(connect(said.append, patience=30), "here")


@pytest.fixture
def look(cluster: Namespace, said: list[str]) -> Callable[[], dict[str, Outcome]]:
    """Return a patient look at one Job."""
    watch = Watch(cluster, "", said.append)
    watch.follow("j", RuleJob("train_model", {}), None)
    return lambda: watch.look_patiently(["j"], said.append)


def test_an_unreadable_answer_ends_no_call(server: BadMinutes, look: Callable[[], dict[str, Outcome]]) -> None:
    server.answers = [(200, {"items": [{"metadata": {}}]}, {}), (200, {"kind": "Status"}, {})]
    assert look() == {}
    assert look() == {}
    assert look()["j"].state == "failed"  # it is not among the existing Jobs


def test_a_call_ends_when_the_cluster_has_refused_to_show_its_jobs_for_long(
    server: BadMinutes, look: Callable[[], dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [refusal(403, "Forbidden")] * 2
    assert look() == {}
    monkeypatch.setattr("vlmflow.remote.kubernetes.watch.BLIND_SECONDS", 0.0)
    with pytest.raises(VlmflowError, match=r"has not shown the Jobs for .*: said Forbidden"):
        look()


def test_forbidden_nodes_are_requested_once(cluster: Namespace, server: BadMinutes) -> None:
    server.answers = [refusal(403, "Forbidden")]
    assert cluster.nodes() is None
    assert cluster.nodes() is None
    assert len(server.asked) == 1


def test_a_missing_log_is_not_a_failure(cluster: Namespace, server: BadMinutes) -> None:
    for code in (400, 500):
        server.answers = [refusal(code, "BadRequest"), (200, {}, {})]
        assert cluster.log_end("p", 5) == ""
        server.answers.clear()
    assert len(server.asked) == 2


def test_a_pods_log_is_kept_whatever_the_shells_language(tmp_path: Path) -> None:
    """A byte that is no UTF-8 is U+FFFD in it, which other encodings lack."""
    executor = object.__new__(HardenedExecutor)
    executor.log_path, said = tmp_path, "caf\ufffd"
    executor.cluster = SimpleNamespace(log_end=lambda *words: said)
    executor._rule_job_of = lambda job: SimpleNamespace(nodes=1)
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        kept = executor._save_log(SimpleNamespace(external_jobid="job", job=None), Outcome("failed", "pod"))
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert kept == (said, tmp_path / "job.log")
    assert kept[1].read_text("utf-8") == said


def test_a_check_before_the_executor_is_ready_finds_nothing() -> None:
    """Snakemake's checking thread starts before __post_init__; if it ended there, it would never see a Job again."""
    executor = object.__new__(HardenedExecutor)

    async def look() -> list:
        return [info async for info in executor.check_active_jobs([])]

    assert asyncio.run(look()) == []


JOB = {"metadata": {"name": "j"}, "spec": {"template": {"spec": {"containers": []}}}}
TAKEN = Outcome("failed", "p", Ended("preempted", "preempted"))


@pytest.fixture
def disruptions(cluster: Namespace, said: list[str]) -> Disruptions:
    """Return the budget of one created Job, whose pauses end at once."""
    disruptions = Disruptions(cluster, Watch(cluster, "", said.append), clock=lambda: 0.0)
    disruptions.create(JOB, RuleJob("train_model", {}), None)
    return disruptions


def test_a_job_that_was_removed_is_created_again_after_a_growing_pause(
    disruptions: Disruptions, server: BadMinutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(disruptions, "_clock", lambda: now)
    name, pauses = "j", []
    for number in range(2, 6):
        planned = disruptions.plan(name, TAKEN)
        assert planned.state == "waiting"
        assert "this uses no retry" in planned.ended.cause
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
    assert (over.state, over.ended.again) == ("failed", False)
    assert "disruption 21 in a row" in over.ended.cause


def test_a_create_that_timed_out_is_checked(cluster: Namespace, server: BadMinutes, said: list[str]) -> None:
    """The Job may exist; a second one would write the same targets."""
    cluster.client.rest_client._patience = 0.0
    watch = Watch(cluster, "", said.append)
    disruptions = Disruptions(cluster, watch)
    server.answers = [(None, {}, {})]
    disruptions.create(JOB, RuleJob("train_model", {}), None)
    there = {"metadata": {"name": "j"}, "spec": {}}
    server.answers = [(200, {"items": []}, {}), (200, {"items": [there]}, {})]
    assert watch.look(["j"])["j"].state == "waiting"
    outcome = watch.look(["j"])["j"]
    planned = disruptions.plan("j", outcome)
    assert (outcome.ended.taken_away, planned.state) == (True, "waiting")
    assert planned.ended.cause.startswith("its Job could not be created: ")
    taken = disruptions.plan("j", TAKEN)  # it existed after all: its pod ran
    assert taken.ended.cause.startswith("preempted")


FULL = 'jobs.batch "j" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: 3, limited: 3'


@pytest.mark.parametrize("limit", [None, 9_000.0])
def test_a_full_quota_of_jobs_is_waited_for_as_one_of_pods(
    cluster: Namespace, server: BadMinutes, said: list[str], limit: float | None
) -> None:
    """It may be full for hours."""
    now = 0.0
    cluster.client.rest_client._patience = 0.0
    disruptions = Disruptions(cluster, Watch(cluster, "", said.append), lambda: now)
    server.answers = [refusal(403, "Forbidden", FULL)]
    disruptions.create(JOB, RuleJob("train_model", {}), limit)
    name, gone = "j", Outcome("failed", ended=Ended("lost", "its Job is gone"))
    while now < 8_900:
        planned = disruptions.plan(name, gone)
        assert planned.state == "waiting"
        assert "exceeded quota" in planned.ended.cause
        assert "disruption" not in planned.ended.cause
        while disruptions.resting(name):
            now += 10
            server.answers = [refusal(403, "Forbidden", FULL)]
            name = disruptions.create_due(name)
    now += 200
    last = disruptions.plan(name, gone)
    assert (last.state, last.ended.how) == (("waiting", "lost") if limit is None else ("failed", "refused"))
    assert limit is None or "its template allows 9000 s" in last.ended.cause


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
def test_only_permanent_refusals_of_a_creation_are_raised(
    cluster: Namespace, server: BadMinutes, said: list[str], answer: tuple, refused: bool
) -> None:
    cluster.client.rest_client._patience = 0.0
    server.answers = [refusal(*answer)] * 2
    with pytest.raises(Refused) if refused else nullcontext():
        disruptions = Disruptions(cluster, Watch(cluster, "", said.append))
        disruptions.create(JOB, RuleJob("train_model", {}), None)


def test_a_connection_that_broke_off_refuses_nothing() -> None:
    broken = Refused.of(ApiException(status=0, reason="SSLError: EOF occurred in violation of protocol"))
    assert not is_refusal(broken)
    assert not_created(broken).ended.again
    assert not_created(broken).ended.how == "refused"


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


def test_an_answer_of_another_form_is_read_completely(cluster: Namespace, server: BadMinutes) -> None:
    odd = {"metadata": {"name": "a"}, "status": {"allocatable": 5}}
    server.answers = [(200, {"items": [odd]}, {})]
    assert cluster.nodes() == [odd]
