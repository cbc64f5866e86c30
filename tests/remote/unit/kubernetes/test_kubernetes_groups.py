"""A training on several nodes as one Job of several pods: its objects, its outcome, why it waits, and its tries."""

from copy import deepcopy
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.groups import GROUP, as_attempt, node_of, nodes_of, service_of
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import shape
from vlmflow.remote.kubernetes.outcome import Outcome, judge_pods
from vlmflow.remote.kubernetes.templates import read_template, template_in
from vlmflow.remote.kubernetes.waiting import ClusterState, explain
from vlmflow.remote.kubernetes.watch import Disruptions, JobRecord, Watch
from workflow_runs import ROOT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DEPLOY = "python -m snakemake --deploy-sources s.tar.xz 0af1 --default-storage-provider fs"
RULE = f"pip install x && {DEPLOY} && python -m snakemake --snakefile Snakefile"
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def gpu_template() -> dict:
    return template_in(yaml.safe_load((ROOT / "k8s/templates/gpu.yaml").read_text()))


def shaped(nodes: int, command: str = RULE, gpu: dict | None = None) -> dict:
    """Return the Job of a training, with the template `gpu` or a changed one, without a name."""
    container = {"name": "snakemake", "image": "i:1", "args": ["-c", command]}
    plugins = {"metadata": {}, "spec": {"template": {"spec": {"containers": [container]}}}}
    template = read_template(gpu or gpu_template())
    rule_job = RuleJob("train_model", {"run": "a"}, threads=4, gpus=2, nodes=nodes, runs="/outputs/runs/a b")
    return shape(plugins, template, rule_job, {"vlmflow/invocation": "x"}, {})


def spec_of(job: dict) -> dict:
    return job["spec"]["template"]["spec"]


def test_only_node_0_runs_the_rule_and_all_unpack_the_same_sources() -> None:
    job = shaped(2)
    assert (job["spec"]["completions"], job["spec"]["parallelism"], nodes_of(job)) == (2, 2, 2)
    private = f"{DEPLOY} --local-storage-prefix /workdir/.sources"
    rule = RULE.replace(DEPLOY, private)
    python = 'PYTHONPATH="$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" exec python -m vlmflow.supervisor.other_node'
    words = '\'/outputs/runs/a b\' "$VLMFLOW_ATTEMPT" "$JOB_COMPLETION_INDEX" 4'
    other = f"trap : TERM; pip install x && {private} && {python} {words}"
    assert spec_of(job)["containers"][0]["args"] == [
        "-c",
        f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then trap : TERM; {rule}; else {other}; fi',
    ]


def test_without_sources_there_is_no_group() -> None:
    with pytest.raises(VlmflowError, match="the other nodes get no sources"):
        shaped(2, "python -m snakemake")


def test_everything_of_an_attempt_has_its_name() -> None:
    job = shaped(2)
    for name in ("snakejob-1", "snakejob-1-2"):
        one = as_attempt(job, name)
        pod = spec_of(one)
        assert pod["subdomain"] == one["metadata"]["labels"][GROUP] == name
        assert one["spec"]["template"]["metadata"]["labels"][GROUP] == name
        env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert (env["VLMFLOW_ATTEMPT"], env["VLMFLOW_NODE_0"]) == (name, f"{name}-0.{name}")
        (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {GROUP: name}}}
        service = service_of({**one, "metadata": {**one["metadata"], "uid": "u"}})
        assert service["metadata"]["name"] == name
        assert service["metadata"]["ownerReferences"][0]["uid"] == "u"
        assert service["spec"]["selector"] == {GROUP: name}


def test_another_job_keeps_no_distance_to_groups() -> None:
    job = as_attempt(shaped(1), "j")
    assert spec_of(job)["affinity"]["podAntiAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": []}
    assert spec_of(job)["affinity"]["nodeAffinity"]
    assert "subdomain" not in spec_of(job)
    assert GROUP not in str(job)


def test_what_a_template_says_of_other_labels_stays() -> None:
    job = shaped(2)
    mine = {"topologyKey": "zone", "labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}
    both = deepcopy(mine)
    both["labelSelector"]["matchExpressions"].append({"key": GROUP, "operator": "Exists"})
    spec_of(job)["affinity"] = {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": both}, mine]
        }
    }
    spec_of(job)["topologySpreadConstraints"] = [deepcopy(both), deepcopy(mine)]
    pod = spec_of(as_attempt(job, "j"))
    preferred = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    narrowed = mine["labelSelector"] | {"matchLabels": {GROUP: "j"}}
    assert [each.get("podAffinityTerm", each)["labelSelector"] for each in preferred] == [
        narrowed,
        mine["labelSelector"],
    ]
    assert pod["topologySpreadConstraints"] == [mine | {"labelSelector": narrowed}, mine]


def test_a_cluster_s_network_and_queue_are_set_in_the_template() -> None:
    """As docs/kubernetes.md says; no test has run them."""
    gpu = gpu_template()
    gpu["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "my-queue"
    container = gpu["template"]["spec"]["containers"][0]
    container["env"].append({"name": "NCCL_SOCKET_IFNAME", "value": "eth0"})
    container["resources"] = {"limits": {"rdma/hca": "1"}, "requests": {"rdma/hca": "1"}}
    job = as_attempt(shaped(2, gpu=gpu), "j")
    made = spec_of(job)["containers"][0]
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in made["env"]
    assert made["resources"]["limits"]["rdma/hca"] == made["resources"]["requests"]["rdma/hca"] == "1"
    assert made["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "my-queue"


def job(nodes: int = 2, **conditions: str) -> dict:
    said = [{"type": name, "status": "True", "reason": reason} for name, reason in conditions.items()]
    return {"metadata": {"name": "j"}, "spec": {"completions": nodes}, "status": {"conditions": said}}


def pod(node: int, phase: str = "Running", exit_code: int | None = None, ended_ago: float = 5, **more: object) -> dict:
    ended = {"exitCode": exit_code, "reason": more.pop("reason", "Error"), "finishedAt": at(ended_ago)}
    state = {"running": {}} if exit_code is None else {"terminated": ended}
    return {
        "metadata": {
            "name": f"p-{node}",
            "creationTimestamp": "2026-11-21T11:00:00Z",
            "labels": {"job-name": "j", "batch.kubernetes.io/job-completion-index": str(node)},
        },
        "spec": {"nodeName": f"n-{node}", "containers": []},
        "status": {"phase": phase, "containerStatuses": [{"name": "snakemake", "state": state}], **more},
    }


def at(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).isoformat()


def deleted(found: dict, seconds_ago: float, grace: float = 300, reason: str = "") -> dict:
    found["metadata"] |= {"deletionTimestamp": at(seconds_ago - grace), "deletionGracePeriodSeconds": grace}
    if reason:
        said = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
        found["status"]["conditions"] = [said]
    return found


def judged(job: dict | None, pods: list[dict], seen: dict | None = None) -> Outcome:
    return judge_pods(job, pods, seen or {}, NOW)


def test_a_group_runs_when_all_of_its_pods_run() -> None:
    assert judged(job(), []).state == "waiting"
    assert judged(job(), [pod(0)]).state == "waiting"
    assert judged(job(), [pod(0), pod(1, "Pending")]).state == "waiting"
    assert judged(job(), [pod(0), pod(1)]) == Outcome("running", "p-0", others=("p-1",))
    assert judged(job(), [pod(0), pod(1, "Succeeded", 0)]).state == "running"


def test_its_success_is_node_0s() -> None:
    assert judged(job(), [pod(0, "Succeeded", 0), pod(1)]).state == "succeeded"
    assert judged(job(Complete="done"), [], {0: pod(0), 1: pod(1)}).state == "succeeded"


FAILED = job(Failed="BackoffLimitExceeded")


def test_the_pod_that_failed_first_is_the_cause() -> None:
    """The Job controller deletes the others then, and those save their work first."""
    failed = [pod(0, "Failed", 1, ended_ago=9), deleted(pod(1, "Running"), 9)]
    assert judged(FAILED, failed).state == "ending"
    failed[1] = deleted(pod(1, "Failed", 1, ended_ago=2), 9)
    outcome = judged(FAILED, failed)
    assert (outcome.state, outcome.pod, outcome.ended.taken_away) == ("failed", "p-0", False)
    assert outcome.ended.cause == "pod 0: ended with exit code 1"
    assert outcome.others == ("p-1",)
    late = judged(FAILED, [failed[0]], {0: pod(0), 1: pod(1)})
    assert (late.state, late.ended.cause, late.ended.taken_away) == ("failed", outcome.ended.cause, False)


def test_a_pod_without_memory_is_the_cause_although_node_0_fails_too() -> None:
    killed = pod(1, "Failed", 137, ended_ago=9, reason="OOMKilled")
    outcome = judged(FAILED, [pod(0, "Failed", 1, ended_ago=3), killed])
    assert (outcome.pod, outcome.ended.how) == ("p-1", "out of memory")


def test_a_deleted_pod_disrupts_the_group() -> None:
    both = [deleted(pod(0, "Failed", 1, ended_ago=2), 8), deleted(pod(1, "Failed", 1, ended_ago=4), 9)]
    outcome = judged(FAILED, both)
    assert (outcome.state, outcome.pod, outcome.ended.taken_away) == ("failed", "p-1", True)
    assert outcome.ended.cause == "pod 1: its pod was removed: evicted, or deleted by hand"
    evicted = deleted(pod(1, "Failed", 1, ended_ago=4), 9, reason="EvictionByEvictionAPI")
    assert "pod 1: evicted (a drained node, or by hand)" in judged(FAILED, [both[0], evicted]).ended.cause


def test_a_pod_that_vanished_disrupts_the_group() -> None:
    """As after `kubectl delete --force`: no look has seen it end."""
    seen = {0: pod(0), 1: pod(1)}
    ending = judged(FAILED, [deleted(pod(0), 3)], seen)
    assert (ending.state, ending.pod) == ("ending", "p-0")
    outcome = judged(FAILED, [], seen)
    assert (outcome.state, outcome.ended.taken_away, outcome.unseen) == ("failed", True, True)


def test_a_pod_that_vanished_is_the_cause_although_its_job_deletes_the_other() -> None:
    """A pod that exits within a second of its deletion is gone before the next look; its Job has failed by then."""
    failed = job(FailureTarget="BackoffLimitExceeded")
    failed["status"]["conditions"][0]["lastTransitionTime"] = at(3)
    seen = {0: pod(0), 1: pod(1)}
    by_its_job = [deleted(pod(0), 3), deleted(pod(0, "Failed", 143, ended_ago=1), 2)]
    for left, state in zip(by_its_job, ("ending", "failed"), strict=True):
        outcome = judged(failed, [left], seen)
        assert (outcome.state, outcome.pod, outcome.ended.taken_away) == (state, "p-1", True)
        assert outcome.ended.cause == "pod 1: its pod was removed: evicted, or deleted by hand"
    within_a_second = judged(failed, [deleted(pod(node, "Failed", 143, ended_ago=1), 3) for node in (0, 1)])
    assert within_a_second.ended.cause.startswith("pod 0 or 1: its pod was removed")
    before = judged(failed, [deleted(pod(0), 4)], seen)
    assert before.pod == "p-0", "it was deleted while its Job was well"


def test_a_pod_that_was_seen_being_evicted_is_the_cause_after_it_is_gone() -> None:
    """Pod 0, which the Job controller deleted then, or which failed without it, still exists."""
    seen = {0: pod(0), 1: deleted(pod(1), 9, reason="EvictionByEvictionAPI")}
    for left in (deleted(pod(0, "Failed", 1, ended_ago=3), 8), pod(0, "Failed", 1, ended_ago=3)):
        outcome = judged(FAILED, [left], seen)
        assert (outcome.ended.taken_away, outcome.unseen) == (True, False)
        assert outcome.ended.cause == "pod 1: evicted (a drained node, or by hand): m"


def test_a_deleted_job_whose_pods_still_run() -> None:
    ending = judged(None, [pod(0), pod(1)])
    assert (ending.state, ending.ended.cause) == ("ending", "its Job was deleted")


def test_a_lost_node_disrupts_the_group() -> None:
    lost = deleted(pod(1), 400, reason="DeletionByTaintManager")
    outcome = judged(FAILED, [deleted(pod(0, "Failed", 137, ended_ago=90), 399), lost])
    assert (outcome.state, outcome.pod, outcome.ended.taken_away) == ("failed", "p-1", True)
    assert "removed from its node, which does not answer" in outcome.ended.cause


def test_a_suspended_group_waits() -> None:
    queued = job()
    queued["spec"]["suspend"] = True
    assert judged(queued, [deleted(pod(0), 1), deleted(pod(1), 1)]).state == "ending"
    assert judged(queued, [], {0: pod(0), 1: pod(1)}).state == "waiting"
    back = job()
    suspended = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T11:30:00Z"}
    back["status"]["conditions"] = [suspended]
    again = pod(0)
    again["metadata"]["creationTimestamp"] = "2026-11-21T11:30:01Z"
    assert judged(back, [again], {0: pod(0), 1: pod(1)}).state == "waiting"


def unscheduled(node: int) -> dict:
    found = pod(node, "Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": NO_GPU}])
    del found["spec"]["nodeName"]
    return found


def test_the_pod_that_lacks_a_node_is_named() -> None:
    starting = pod(0, "Pending")
    assert explain(job(), [starting, unscheduled(1)], ClusterState()).why.startswith(
        "pod 1 of 0 to 1: nvidia.com/gpu: 0 asked"
    )
    assert explain(job(), [pod(0)], ClusterState()).why == "1 of its 2 pods exist: its pod is not created yet"


class Pods:
    """A namespace with the pods of one Job, at a time; `calls` has what was asked of it."""

    def __init__(self) -> None:
        self.found: list[dict] = []
        self.calls: list[str] = []
        self.time = 0.0

    def pods(self, selector: str) -> list[dict]:
        self.calls.append("pods")
        return self.found

    def jobs(self, selector: str = "") -> list[dict]:
        self.calls.append("jobs")
        return [job(max(2, len(self.found)))]

    def log_end(self, pod: str, lines: int, nodes: int = 1) -> str:
        self.calls.append(f"log {pod}")
        return "r: step 1/2 · 0:01 left"

    def now(self) -> datetime:
        return NOW

    def holding_pods(self) -> list[dict]:
        return self.found

    def events(self) -> list[dict]:
        return []

    def nodes(self) -> None:
        return None


def test_an_incomplete_group_ends_and_comes_back_without_using_its_budget() -> None:
    cluster = Pods()
    watch = Watch(cluster, "", print, lambda: cluster.time, gang_timeout=60)
    rule_job = RuleJob("train_model", {"run": "a"}, nodes=2)
    watch.follow("j", rule_job, None)

    def look(time: float, *pods: dict) -> Outcome:
        cluster.time, cluster.found = time, list(pods)
        return watch.look(["j"])["j"]

    assert look(2, unscheduled(0), unscheduled(1)).state == "waiting"
    assert look(100, unscheduled(0), unscheduled(1)).state == "waiting", "it keeps nothing from others"
    assert look(102, pod(0), unscheduled(1)).state == "waiting"
    assert look(161, pod(0), unscheduled(1)).state == "waiting"
    outcome = look(162, pod(0), unscheduled(1))
    assert (outcome.state, outcome.ended.taken_away, outcome.incomplete) == ("failed", True, True)
    assert "not all of its pods run after 60 s (cluster.gang_timeout): pod 1 of 0 to 1: " in outcome.ended.cause
    disruptions, made, pauses = Disruptions(cluster, watch, lambda: 0.0), JobRecord({}, rule_job, None, "j"), []
    disruptions._jobs["j"] = made
    for _ in range(30):
        planned = disruptions.plan("j", outcome)
        assert planned.state == "waiting"
        pauses.append(made.due)
    assert 0.8 <= pauses[0] <= 7.2
    assert 120 <= pauses[-1] <= 1080
    assert "All of them end, so that others may use their nodes" in planned.ended.cause


def test_a_look_at_sixteen_pods_takes_as_many_calls_as_one() -> None:
    cluster = Pods()
    watch = Watch(cluster, "", print, lambda: 100.0)
    watch.follow("j", RuleJob("train_model", {}, nodes=16), None)
    cluster.found = [pod(node) for node in range(16)]
    assert watch.look(["j"])["j"].state == "running"
    assert cluster.calls == ["pods", "jobs", "log p-0"]


def test_the_number_of_a_pod_is_read_as_data() -> None:
    assert node_of(pod(3)) == 3
    assert node_of({"metadata": {"labels": {"batch.kubernetes.io/job-completion-index": "; rm"}}}) == 0
    before_1_28 = {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "2"}}}
    assert node_of(before_1_28) == 2
