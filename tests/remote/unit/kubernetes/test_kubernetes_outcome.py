"""How a Job ended, judged from objects as the API shows them."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from vlmflow.core.errors import NOT_AGAIN
from vlmflow.remote.job import NO_MEMORY
from vlmflow.remote.kubernetes.outcome import judge

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def job(**conditions: str) -> dict:
    said = [{"type": name, "status": "True", "reason": reason} for name, reason in conditions.items()]
    return {"metadata": {"name": "j"}, "spec": {}, "status": {"conditions": said}}


def pod(phase: str = "Running", exit_code: int | None = None, reason: str = "Error", **status: object) -> dict:
    state = {"running": {}} if exit_code is None else {"terminated": {"exitCode": exit_code, "reason": reason}}
    return {
        "metadata": {"name": "p", "creationTimestamp": "2026-11-21T11:00:00Z"},
        "spec": {"nodeName": "n"},
        "status": {"phase": phase, "containerStatuses": [{"name": "snakemake", "state": state}], **status},
    }


def deleted(found: dict, seconds_ago: float) -> dict:
    found["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=seconds_ago)).isoformat()
    return found


def disrupted(found: dict, reason: str) -> dict:
    found["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "Eviction API: evicting"}
    ]
    return found


def test_running_and_waiting() -> None:
    assert judge(job(), [], None, NOW).state == "waiting"
    assert judge(job(), [pod("Pending")], None, NOW).state == "waiting"
    assert judge(job(), [pod()], None, NOW).state == "running"


def test_success_is_the_containers_even_if_a_sidecar_continues() -> None:
    assert judge(job(), [pod(exit_code=0)], None, NOW).state == "succeeded"
    assert judge(job(Complete="done"), [], pod(), NOW).state == "succeeded"
    assert judge(None, [], pod("Succeeded", 0), NOW).state == "succeeded"


def test_exit_code_is_a_failure_that_may_be_tried_again() -> None:
    outcome = judge(job(Failed="BackoffLimitExceeded"), [pod("Failed", 1)], None, NOW)
    assert (outcome.state, outcome.ended.how, outcome.ended.again, outcome.pod) == ("failed", "failed", True, "p")
    assert "exit code 1" in outcome.ended.cause
    assert "signal 9" in judge(job(), [pod("Failed", 137)], None, NOW).ended.cause


def test_deleted_job() -> None:
    outcome = judge(None, [], None, NOW)
    assert (outcome.state, outcome.ended.how, outcome.ended.again) == ("failed", "lost", True)
    assert "deleted" in outcome.ended.cause
    assert "deleted" in judge(None, [], pod(), NOW).ended.cause
    assert "deleted" in judge(None, [deleted(pod("Failed", 143), -10)], None, NOW).ended.cause


def test_a_pod_that_disappeared_unseen() -> None:
    outcome = judge(job(Failed="BackoffLimitExceeded"), [], pod(), NOW)
    assert (outcome.state, outcome.ended.again, outcome.ended.taken_away) == ("failed", True, True)
    assert "was removed" in outcome.ended.cause


def test_a_deleted_job_has_not_failed_while_its_pod_saves_its_work() -> None:
    assert judge(None, [deleted(pod(), -200)], None, NOW).state == "ending"
    assert judge(job(FailureTarget="x"), [deleted(pod(), -200)], None, NOW).state == "ending"
    assert judge(None, [deleted(pod("Running", 143), -200)], None, NOW).state == "failed"


def test_a_pod_whose_job_was_deleted_without_it_continues() -> None:
    assert judge(None, [pod()], None, NOW).state == "running"


def test_a_lost_nodes_pod_is_given_up() -> None:
    found = disrupted(pod(), "DeletionByTaintManager")
    assert judge(job(), [deleted(found, 10)], None, NOW).state == "ending"
    outcome = judge(job(), [deleted(found, 90)], None, NOW)
    assert (outcome.state, outcome.ended.how, outcome.ended.again) == ("failed", "lost", True)
    assert "does not answer" in outcome.ended.cause
    assert "node n" in judge(job(), [deleted(pod(), 90)], None, NOW).ended.cause


@pytest.mark.parametrize(
    ("reason", "word"), [("PreemptionByScheduler", "preempted"), ("EvictionByEvictionAPI", "evicted")]
)
def test_disruptions_are_named_also_when_the_pod_is_gone(reason: str, word: str) -> None:
    outcome = judge(job(Failed="BackoffLimitExceeded"), [], disrupted(pod(), reason), NOW)
    assert (outcome.state, outcome.ended.how, outcome.ended.again) == ("failed", "preempted", True)
    assert word in outcome.ended.cause


def test_out_of_memory_whatever_the_exit_code() -> None:
    for code in (137, 1):
        outcome = judge(job(), [pod("Failed", code, "OOMKilled")], None, NOW)
        assert (outcome.state, outcome.ended.how) == ("failed", "out of memory")
    assert judge(job(), [pod("Succeeded", 0, "OOMKilled")], None, NOW).state == "succeeded"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('Container snakemake exceeded its local ephemeral storage limit "1M".', "larger disk_mb"),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 1M.", "larger disk_mb"),
        ('Usage of EmptyDir volume "shm" exceeds the limit "16Gi".', "sizeLimit of that volume"),
        ("The node was low on resource: ephemeral-storage.", ""),
    ],
)
def test_disk_limits_are_not_tried_again(message: str, hint: str) -> None:
    evicted = pod("Failed", None)
    evicted["status"] |= {"reason": "Evicted", "message": message}
    outcome = judge(job(), [evicted], None, NOW)
    assert (outcome.ended.again, outcome.ended.taken_away) == (not hint, not hint)
    cause, _, step = outcome.ended.cause.partition("; ")
    assert cause == f"evicted: {message}"
    assert hint in step


def test_deadline() -> None:
    late = pod("Failed", None)
    late["status"]["reason"] = "DeadlineExceeded"
    ended = judge(job(), [late], None, NOW).ended
    assert (ended.how, ended.again) == ("out of time", True)
    assert "runtime" in ended.cause


@pytest.mark.parametrize(
    ("message", "again"),
    [
        (json.dumps(NOT_AGAIN), False),
        ("", True),
        ("not json", True),
        ("[" * 4_000, True),
        ('{"again": true}', True),
        ('{"again": 0, "more": 1}', True),
        (json.dumps(NOT_AGAIN) + " " * 5_000, True),
    ],
)
def test_a_failure_that_a_stage_reports_is_not_retried(message: str, again: bool) -> None:
    ended = pod("Failed", 1)
    ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    outcome = judge(job(Failed="BackoffLimitExceeded"), [ended], None, NOW)
    assert (outcome.state, outcome.ended.again, outcome.ended.taken_away) == ("failed", again, False)


def test_a_process_that_was_killed_for_its_memory_is_known_by_its_pods_word() -> None:
    """With control groups of version 1 Kubernetes says exit code 1; another attempt gets more memory."""
    ended = pod("Failed", 1)
    ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = json.dumps({NO_MEMORY: True})
    outcome = judge(job(Failed="BackoffLimitExceeded"), [ended], None, NOW)
    assert (outcome.ended.how, outcome.ended.again) == ("out of memory", True)


def test_a_stage_that_fails_while_its_pod_is_removed_was_disrupted() -> None:
    ended = disrupted(pod("Failed", 1), "PreemptionByScheduler")
    ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = json.dumps(NOT_AGAIN)
    outcome = judge(job(), [ended], None, NOW)
    assert (outcome.ended.again, outcome.ended.taken_away) == (True, True)


@pytest.mark.parametrize("message", ["", json.dumps(NOT_AGAIN)])
def test_a_pod_that_fails_as_it_is_deleted_by_hand_was_disrupted(message: str) -> None:
    """As if it were gone at the next check: what a stage reports while it must end is not its own failure."""
    ended = deleted(pod("Failed", 1), -200)
    ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    seen = judge(job(Failed="BackoffLimitExceeded"), [ended], None, NOW)
    gone = judge(job(), [], deleted(pod(), -200), NOW)
    assert (seen.state, seen.ended.cause, seen.ended.again, seen.ended.taken_away) == (
        gone.state,
        gone.ended.cause,
        True,
        True,
    )


def suspended(is_now: bool, at: str = "2026-11-21T11:30:00Z") -> dict:
    """Return a Job that a queue has suspended, or has resumed."""
    condition = {"type": "Suspended", "status": str(is_now), "lastTransitionTime": at}
    return {"metadata": {"name": "j"}, "spec": {"suspend": is_now}, "status": {"conditions": [condition]}}


def test_a_job_that_its_queue_preempts_waits() -> None:
    ending = judge(suspended(True), [deleted(pod(), -200)], None, NOW)
    assert (ending.state, ending.ended.cause) == ("ending", "its Job is suspended")
    for last in (pod(), pod("Failed", 143), deleted(pod(), 90)):
        assert judge(suspended(True), [], last, NOW).state == "waiting"
    assert judge(suspended(True), [deleted(pod("Failed", 143), 5)], None, NOW).state == "waiting"
    assert judge(suspended(True), [], None, NOW).state == "waiting"


@pytest.mark.parametrize("found", [job(), suspended(True), None])
def test_a_pod_that_still_saves_its_work_is_not_taken_away_yet(found: dict | None) -> None:
    assert not judge(found, [deleted(pod(), -200)], None, NOW).ended.taken_away
    assert judge(job(), [], deleted(pod(), -200), NOW).ended.taken_away


def test_a_job_that_its_queue_resumes_waits_for_its_next_pod() -> None:
    assert judge(suspended(False), [], pod(), NOW).state == "waiting"
    new = pod() | {"metadata": {"name": "new", "creationTimestamp": "2026-11-21T11:30:00Z"}}
    assert judge(suspended(False), [new], pod(), NOW).state == "running"
    assert judge(suspended(False), [], new, NOW).ended.taken_away


def test_a_suspended_job_that_has_ended_has_ended() -> None:
    assert judge(suspended(True), [], pod("Succeeded", 0), NOW).state == "succeeded"
    failed = suspended(True)
    failed["status"]["conditions"] += job(Failed="BackoffLimitExceeded")["status"]["conditions"]
    assert judge(failed, [], pod("Failed", 1), NOW).state == "failed"


def test_a_pod_that_its_node_refuses_is_made_again() -> None:
    refused = {
        **pod("Failed"),
        "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"},
    }
    outcome = judge(job(Failed="BackoffLimitExceeded"), [refused], None, NOW)
    assert (outcome.ended.cause, outcome.ended.taken_away) == ("UnexpectedAdmissionError no GPU", True)
