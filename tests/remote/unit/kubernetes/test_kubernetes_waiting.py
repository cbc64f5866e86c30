"""The reasons why a pod is Pending."""

import time
from datetime import UTC, datetime

import pytest

from vlmflow.remote.cluster.api import Refused
from vlmflow.remote.job import RuleJob, cause, newest_progress
from vlmflow.remote.kubernetes import waiting
from vlmflow.remote.kubernetes.waiting import ClusterState, Waiting
from vlmflow.remote.kubernetes.watch import Watch

JOB = {"metadata": {"name": "j", "labels": {}}, "spec": {}}


def explain(job: dict, pods: list[dict], events: list[dict], nodes: list[dict] | None) -> Waiting:
    own = [pod for pod in pods if pod["metadata"].get("labels", {}).get("job-name") == job["metadata"]["name"]]
    return waiting.explain(job, own, ClusterState(pods, events, nodes))


def pod(requests: dict | None = None, message: str = "", node: str | None = None, waiting: dict | None = None) -> dict:
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}] if message else []
    containers = [{"name": "snakemake", "resources": {"requests": requests or {}}}]
    statuses = [{"name": "snakemake", "image": "i:1", "state": {"waiting": waiting}}] if waiting else []
    return {
        "metadata": {"name": "p", "labels": {"job-name": "j"}},
        "spec": {
            "containers": containers,
            **({"nodeName": node} if node else {}),
            "volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "cache"}}],
        },
        "status": {"phase": "Pending", "conditions": conditions, "containerStatuses": statuses},
    }


def node(name: str, **allocatable: str) -> dict:
    names = {"gpu": "nvidia.com/gpu", "memory": "memory", "cpu": "cpu"}
    return {"metadata": {"name": name}, "status": {"allocatable": {names[key]: v for key, v in allocatable.items()}}}


def event(kind: str, name: str, reason: str, message: str) -> dict:
    return {"involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message}


GPUS = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/2 nodes."


def test_a_resource_that_no_node_has_so_much_of() -> None:
    own = pod({"nvidia.com/gpu": "4"}, GPUS)
    why = explain(JOB, [own], [], [node("a", gpu="2"), node("b")]).why
    assert "nvidia.com/gpu: 4 asked, the largest node has 2: 2 short" in why
    assert "preemption" not in why
    assert "claims" not in why


def test_a_resource_that_others_use() -> None:
    own = pod({"nvidia.com/gpu": "4"}, GPUS)
    other = pod({"nvidia.com/gpu": "3"}, node="a")
    other["metadata"] = {"name": "o"}
    why = explain(JOB, [own, other], [], [node("a", gpu="4")]).why
    assert "4 asked, at most 1 free on a node: 3 short" in why


def test_memory_is_reported_in_gb() -> None:
    own = pod({"memory": "64000M"}, "0/1 nodes are available: 1 Insufficient memory.")
    assert "memory: 64.0 GB asked, the largest node has 16.0 GB: 48.0 GB short" in (
        explain(JOB, [own], [], [node("a", memory="16G")]).why
    )


def test_without_the_right_to_see_nodes() -> None:
    why = explain(JOB, [pod({"nvidia.com/gpu": "4"}, GPUS)], [], None).why
    assert "4 asked, more than is free on any node" in why


def test_taints_are_reported_as_the_scheduler_words_them() -> None:
    why = explain(JOB, [pod({}, "0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.")], [], []).why
    assert "untolerated taint {a: b}" in why


def test_the_unbound_claim_is_named() -> None:
    own = pod({}, "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    said = [event("PersistentVolumeClaim", "cache", "FailedBinding", "no storage class is set")]
    assert "claim cache is not bound (no storage class is set)" in explain(JOB, [own], said, []).why
    assert "(cache)" in explain(JOB, [own], [], []).why


PULL = 'failed to pull and unpack image "r.io/a:1": failed to resolve reference "r.io/a:1": '
"""The beginning of containerd's messages; its own and the registries' words follow."""


@pytest.mark.parametrize(
    ("reason", "message", "hopeless", "again"),
    [
        ("InvalidImageName", 'couldn\'t parse image name "A:1"', 0.0, False),
        ("ErrImagePull", f"{PULL}r.io/a:1: not found", 120.0, False),
        ("ErrImagePull", f"{PULL}pull access denied, repository does not exist", 120.0, False),
        ("ErrImagePull", f"{PULL}unexpected status from HEAD request: 401 Unauthorized", 120.0, False),
        ("ErrImagePull", f"{PULL}unexpected status from HEAD request: 503 Service Unavailable", 1800.0, True),
        ("ErrImagePull", f"{PULL}dial tcp: lookup r.io on 10.0.0.10:53: no such host", 1800.0, True),
        ("ErrImagePull", f"{PULL}dial tcp 1.2.3.4:443: i/o timeout", 1800.0, True),
        ("ErrImagePull", f"{PULL}429 Too Many Requests - toomanyrequests: pull rate limit", 1800.0, True),
        ("CreateContainerConfigError", 'secret "hf-token" not found', 120.0, False),
        (
            "CreateContainerConfigError",
            "failed to sync secret cache: timed out waiting for the condition",
            1800.0,
            True,
        ),
    ],
)
def test_only_what_is_refused_in_so_many_words_is_given_up_soon(
    reason: str, message: str, hopeless: float, again: bool
) -> None:
    waiting = explain(JOB, [pod(node="a", waiting={"reason": reason, "message": message})], [], None)
    assert message in waiting.why
    assert (waiting.hopeless_after, waiting.again, waiting.trying) == (hopeless, again, False)


def at(time: str, found: dict) -> dict:
    return found | {"lastTimestamp": f"2026-11-21T11:{time}Z"}


def test_a_paused_pull_is_judged_by_its_last_message_and_a_running_one_is_waited_for() -> None:
    own = pod(node="a", waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "r.io/a:1"'})
    said = [at("00:00", event("Pod", "p", "Pulling", "Pulling image")), at("00:20", event("Pod", "p", "Failed", PULL))]
    assert explain(JOB, [own], said, None).hopeless_after == 1800.0
    said[1]["message"] += "not found"
    assert explain(JOB, [own], said, None).hopeless_after == 120.0
    assert not explain(JOB, [own], said, None).trying
    assert explain(JOB, [own], [*said, at("05:00", event("Pod", "p", "Pulling", "Pulling image"))], None).trying


@pytest.mark.parametrize(
    ("message", "hopeless", "again"),
    [
        ('Internal error occurred: failed calling webhook "k.io": connect: connection refused', 1800.0, True),
        ('admission webhook "k.io" denied the request: no queue', 120.0, False),
        ('pods "x-" is forbidden: error looking up service account a/b: serviceaccount "b" not found', 120.0, False),
    ],
)
def test_a_webhook_that_is_away_is_waited_for(message: str, hopeless: float, again: bool) -> None:
    waiting = explain(JOB, [], [event("Job", "j", "FailedCreate", f"Error creating: {message}")], None)
    assert waiting.why == f"its pod is refused: {message}"
    assert (waiting.hopeless_after, waiting.again) == (hopeless, again)


def test_no_pod_for_quota_and_for_pod_security() -> None:
    quota = 'Error creating: pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3'
    waiting = explain(JOB, [], [event("Job", "j", "FailedCreate", quota)], None)
    assert "quota q is exhausted" in waiting.why
    assert waiting.hopeless_after is None
    never = quota.replace("requested: pods=1", "requested: pods=1,requests.memory=5Gi").replace(
        "limited: pods=3", "limited: pods=3,requests.memory=4000Mi"
    )
    waiting = explain(JOB, [], [event("Job", "j", "FailedCreate", never)], None)
    assert "quota q can never allow it" in waiting.why
    assert waiting.hopeless_after == 0
    security = 'Error creating: pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged'
    waiting = explain(JOB, [], [event("Job", "j", "FailedCreate", security)], None)
    assert "violates PodSecurity" in waiting.why
    assert waiting.hopeless_after == 0.0


def test_suspended_by_a_queue() -> None:
    suspended = {"metadata": {"name": "j", "labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": True}}
    assert "queue q" in explain(suspended, [], [], None).why


def test_volumes_that_cannot_be_mounted_are_reported() -> None:
    said = [event("Pod", "p", "FailedMount", "timed out")]
    assert "node a cannot set up the pod: timed out" in explain(JOB, [pod(node="a")], said, None).why


class FakeTime:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class OnePod:
    """The namespace's answers, set by a test: judging them needs no cluster."""

    def __init__(self) -> None:
        self.pod = pod({"nvidia.com/gpu": "4"}, GPUS)
        self.log = ""
        self.said: list[dict] = []
        self.job = JOB
        self.nodes_read = 0

    def jobs(self, selector: str) -> list:
        return [self.job]

    def pods(self, selector: str = "") -> list:
        return [self.pod] if self.pod else []

    holding_pods = pods

    def now(self) -> datetime:
        return datetime.now(UTC)

    def events(self) -> list:
        return self.said

    def nodes(self) -> list:
        self.nodes_read += 1
        return [node("a", gpu="2")]

    def log_end(self, name: str, lines: int, nodes: int = 1) -> str:
        return self.log


@pytest.fixture
def watched() -> tuple:
    cluster, clock, said = OnePod(), FakeTime(), []
    watch = Watch(cluster, "", said.append, clock)
    return watch, cluster, clock, said


def test_waiting_is_reported_after_30_s_and_when_the_reason_changes(watched: tuple) -> None:
    watch, cluster, clock, said = watched
    watch.follow("j", RuleJob("train_model", {"run": "x"}), None)
    for _ in range(3):
        watch.look(["j"])
        clock.now += 10
    assert said == []
    for _ in range(5):
        clock.now += 10
        watch.look(["j"])
    assert len(said) == 1
    assert "train_model run=x has waited 40 s: nvidia.com/gpu: 4 asked" in said[0]
    cluster.pod = pod(message="0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.")
    clock.now += 10
    watch.look(["j"])
    assert len(said) == 2
    assert "untolerated taint" in said[1]
    cluster.pod["status"]["phase"] = "Running"
    assert watch.look(["j"])["j"].state == "running"
    assert said[2:] == ["train_model run=x is running."]


@pytest.mark.parametrize(("words", "seconds", "again"), [("not found", 120, False), ("i/o timeout", 1800, True)])
def test_an_image_that_cannot_be_pulled_is_given_up_in_the_end(
    watched: tuple, words: str, seconds: int, again: bool
) -> None:
    watch, cluster, clock, _ = watched
    watch.follow("j", RuleJob("x"), None)
    cluster.said = [at("00:00", event("Pod", "p", "Failed", PULL + words))]
    for waited in range(0, seconds, 10):
        reason = "ErrImagePull" if waited < 20 else "ImagePullBackOff"
        cluster.pod = pod(node="a", waiting={"reason": reason, "message": words if waited < 20 else "Back-off"})
        assert watch.look(["j"])["j"].state == "waiting"
        clock.now += 10
    cluster.said.append(at("00:01", event("Pod", "p", "Pulling", "Pulling image")))
    clock.now += 30
    assert watch.look(["j"])["j"].state == "waiting"  # it is being pulled
    cluster.said.append(at("00:02", event("Pod", "p", "Failed", PULL + words)))
    clock.now += 30
    outcome = watch.look(["j"])["j"]
    assert (outcome.state, outcome.ended.again) == ("failed", again)
    assert "cannot be pulled" in outcome.ended.cause


def test_a_registry_that_was_away_is_given_its_time_to_refuse_for_good(watched: tuple) -> None:
    watch, cluster, clock, _ = watched
    watch.follow("j", RuleJob("x"), None)
    for words, state in (("i/o timeout", "waiting"), ("401 Unauthorized", "waiting"), ("denied", "failed")):
        cluster.pod = pod(node="a", waiting={"reason": "ErrImagePull", "message": words})
        assert watch.look(["j"])["j"].state == state, words
        clock.now += 600


def test_the_state_that_explains_waiting_is_read_every_half_minute(watched: tuple) -> None:
    watch, cluster, clock, _ = watched
    watch.follow("j", RuleJob("x"), None)
    for _ in range(60):
        watch.look(["j"])
        clock.now += 2
    assert cluster.nodes_read == 4


def test_a_job_that_ran_before_it_was_suspended_waits_from_then_on(watched: tuple) -> None:
    watch, cluster, clock, _ = watched
    watch.follow("j", RuleJob("x"), 60.0)
    cluster.pod["status"]["phase"] = "Running"
    for _ in range(10):
        outcome = watch.look(["j"])["j"]
        clock.now += 30
    assert (outcome.state, outcome.ran) == ("running", 270.0)
    cluster.pod = None
    cluster.job = JOB | {"spec": {"suspend": True}}
    assert watch.look(["j"])["j"].state == "waiting"
    clock.now += 61
    assert "its Job is suspended" in watch.look(["j"])["j"].ended.cause


def test_a_templates_limit_of_waiting(watched: tuple) -> None:
    watch, _, clock, _ = watched
    watch.follow("j", RuleJob("x"), 60.0)
    assert watch.look(["j"])["j"].state == "waiting"
    clock.now += 60
    outcome = watch.look(["j"])["j"]
    assert (outcome.state, outcome.ended.again) == ("failed", False)
    assert "its template allows 60" in outcome.ended.cause


def test_progress_is_reported_when_it_changes(watched: tuple) -> None:
    watch, cluster, clock, said = watched
    cluster.pod["status"]["phase"] = "Running"
    cluster.log = "noise\ntrain_model x: step 1/6 · loss 2.000 · 1.20 s/step · 0:06 left\nmore noise\n"
    watch.follow("j", RuleJob("x"), None)
    for _ in range(3):
        watch.look(["j"])
        clock.now += 31
    assert said == ["train_model x: step 1/6 · loss 2.000 · 1.20 s/step · 0:06 left"]


def test_lines_of_progress() -> None:
    rows = "convert_rows fire/train: 1,200 of 5,000 rows · 600 rows/s · 0:06 left"
    assert newest_progress(f"a\n{rows}\nSelect jobs\n") == rows
    assert newest_progress("nothing\nof the kind\n") == ""


def test_only_the_text_of_a_log_is_shown() -> None:
    line = "rows: 1 of 5 rows · 0:06 left"
    assert newest_progress(f"\x1b[2J\x1b]0;mine\x07{line}") == f"[2J]0;mine{line}"
    assert newest_progress(f"{line}\n" + "x · " * 1_000_000 + "0:06 left") == line
    begun = time.process_time()
    assert newest_progress(("x" + " · " * 600 + "\n") * 100) == ""
    assert time.process_time() - begun < 0.5  # a search from every dot took 2 s
    assert cause("\x1b[31mthe stage failed: " + "x" * 5_000).startswith("the stage failed: xxx")
    assert len(cause("x" * 3_000_000)) < 2_100


def test_the_cause_of_a_failure() -> None:
    said = "x\nthe stage failed: no\n  what to do: y\n"
    assert cause(said) == "the stage failed: no\n  what to do: y"
    assert cause(f"{said}RuleException:\nError in rule a:\n") == cause(said)
    assert cause("\n".join(map(str, range(20)))) == "\n".join(map(str, range(12, 20)))


TAKEN = "its pod was removed: evicted, or deleted by hand"


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("Preempted", "by pod 1-2 on node a", "preempted by a pod of higher priority: by pod 1-2 on node a"),
        ("TaintManagerEviction", "Marking", "removed from its node, which does not answer or has a new taint: Marking"),
        ("TaintManagerEviction", "Cancelling deletion of Pod a/p", TAKEN),
        ("Killing", "Stopping container", TAKEN),
    ],
)
def test_a_pod_that_disappeared_between_two_checks_is_judged_by_its_events(
    watched: tuple, reason: str, message: str, words: str
) -> None:
    watch, cluster, _, _ = watched
    watch.follow("j", RuleJob("train_model", {"run": "x"}), None)
    cluster.pod["status"]["phase"] = "Running"
    assert watch.look(["j"])["j"].state == "running"
    cluster.pod = None
    cluster.said = [event("Pod", "other", "Preempted", "not this one"), event("Pod", "p", reason, message)]
    outcome = watch.look(["j"])["j"]
    assert (outcome.state, outcome.ended.cause, outcome.ended.again) == ("failed", words, True)


def test_a_pod_that_disappeared_is_reported_even_without_events(
    watched: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> list:
        raise Refused(500, "away")

    watch, cluster, _, _ = watched
    watch.follow("j", RuleJob("train_model", {"run": "x"}), None)
    cluster.pod["status"]["phase"] = "Running"
    watch.look(["j"])
    cluster.pod = None
    monkeypatch.setattr(cluster, "events", refused)
    assert watch.look(["j"])["j"].ended.cause == TAKEN
