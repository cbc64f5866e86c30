"""A group as a PyTorchJob or a TrainJob; tests/remote/cluster/test_operators.py shows what the operators take."""

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bad_minutes import BadMinutes, refusal, serving_by_default
from unit.kubernetes.test_kubernetes_groups import NOW, pod, shaped
from vlmflow.config.model import ClusterSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.api import Api, connect
from vlmflow.remote.cluster.groups import (
    GROUP,
    INDEXED_JOB,
    KINDS,
    PYTORCHJOB,
    TRAINJOB,
    IndexedJob,
    as_attempt,
    check_served,
    job_of,
    node_of,
    rule_container,
)
from vlmflow.remote.job import Ended, RuleJob
from vlmflow.remote.kubernetes import objects
from vlmflow.remote.kubernetes.executor import HardenedExecutor
from vlmflow.remote.kubernetes.namespace import Namespace, end_all, refuse_strangers
from vlmflow.remote.kubernetes.outcome import Outcome, judge_pods, newest_seen, terminated
from vlmflow.remote.kubernetes.waiting import ClusterState, explain
from vlmflow.remote.kubernetes.watch import Disruptions, Watch
from workflow_runs import ROOT

OWN = [PYTORCHJOB, TRAINJOB]
HERE = "/apis/{}/namespaces/here/{}"
COMPONENTS = {"pytorchjob": "training-operator", "trainjob": "trainer"}
"""The folder of k8s/components with the controller's rights, by the name of a kind."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadMinutes]:
    with serving_by_default(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(params=OWN, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> IndexedJob:
    return request.param


def namespace(kind: IndexedJob, patience: float = 0.0) -> Namespace:
    return Namespace(connect(print, patience=patience), "here", kind)


def group() -> dict:
    """Return a finished Job of two pods, with a second container."""
    job = shaped(2)
    job["spec"]["template"]["spec"]["containers"].append({"name": "beside", "image": "b:1"})
    return as_attempt(job, "attempt-1")


def pods_and_rest(made: dict) -> tuple[dict, dict]:
    """Return the pod template of an object, and the object with the word POD in its place."""
    rest = deepcopy(made)
    inside = rest["spec"]
    for key in (
        ("pytorchReplicaSpecs", "Worker") if "pytorchReplicaSpecs" in inside else ("template", "spec", "replicatedJobs")
    ):
        inside = inside[key]
    inside = inside if isinstance(inside, dict) else inside[0]["template"]["spec"]
    pods, inside["template"] = inside["template"], "POD"
    return pods, rest


def test_the_configuration_names_all_kinds() -> None:
    assert ClusterSettings().multi_node == INDEXED_JOB.name
    assert [ClusterSettings(multi_node=name).multi_node for name in KINDS] == [*objects.GROUPS]


def test_a_pytorchjob_is_one_of_workers_alone() -> None:
    ((path, made),) = PYTORCHJOB.objects(group())
    assert path == "kubeflow.org/v1/pytorchjobs"
    pods, rest = pods_and_rest(made)
    assert rest == {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": group()["metadata"],
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": 604800},
            "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "restartPolicy": "Never", "template": "POD"}},
        },
    }
    number = {"fieldRef": {"fieldPath": "metadata.labels['training.kubeflow.org/replica-index']"}}
    assert {"name": "JOB_COMPLETION_INDEX", "valueFrom": number} in pods["spec"]["containers"][0]["env"]


def test_a_trainjob_comes_after_its_runtime() -> None:
    (first, runtime), (second, made) = TRAINJOB.objects(group())
    assert [first, second] == [
        f"trainer.kubeflow.org/v1alpha1/{plural}" for plural in ("trainingruntimes", "trainjobs")
    ]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert pods_and_rest(runtime)[1] == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": group()["metadata"],
        "spec": {
            "mlPolicy": {"numNodes": 2},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": labels},
                                "spec": {"backoffLimit": 0, "template": "POD"},
                            },
                        }
                    ]
                }
            },
        },
    }
    assert made.pop("metadata")["labels"] == group()["metadata"]["labels"]
    assert made == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "attempt-1"},
        },
    }


def test_an_operator_gets_our_pods_with_its_own_names(kind: IndexedJob) -> None:
    ours = group()["spec"]["template"]
    pods, _ = pods_and_rest(kind.objects(group())[0][1])
    assert pods["metadata"] == ours["metadata"]
    assert pods["metadata"]["labels"][GROUP] == "attempt-1"
    assert [each["name"] for each in pods["spec"]["containers"]] == [kind.container, "beside"]
    env = {each["name"]: each.get("value") for each in pods["spec"]["containers"][0]["env"]}
    node_0 = {"pytorchjob": "attempt-1-worker-0", "trainjob": "attempt-1-node-0-0.attempt-1"}[kind.name]
    assert (env["VLMFLOW_ATTEMPT"], env["VLMFLOW_NODE_0"]) == ("attempt-1", node_0)
    assert ours["spec"].keys() - pods["spec"].keys() == {"subdomain"}, "the operators set it, for their own Services"
    for key in ("args", "image", "resources", "volumeMounts"):
        if key in ours["spec"]["containers"][0]:
            assert pods["spec"]["containers"][0][key] == ours["spec"]["containers"][0][key]


def said(kind: str, reason: str) -> dict:
    return {"type": kind, "status": "True", "reason": reason}


ENDED = {"type": "Running", "status": "False", "reason": "PyTorchJobRunning"}
CREATED, RUNS = said("Created", "PyTorchJobCreated"), said("Running", "PyTorchJobRunning")


@pytest.mark.parametrize(
    ("kind", "conditions", "state"),
    [
        (PYTORCHJOB, None, "waiting"),
        (PYTORCHJOB, [CREATED, RUNS], "waiting"),
        (PYTORCHJOB, [CREATED, ENDED, said("Succeeded", "PyTorchJobSucceeded")], "succeeded"),
        (PYTORCHJOB, [CREATED, ENDED, said("Failed", "PyTorchJobFailed")], "failed"),
        (TRAINJOB, None, "waiting"),
        (TRAINJOB, [said("Complete", "AllJobsCompleted")], "succeeded"),
        (TRAINJOB, [said("Failed", "FailedJobs")], "failed"),
    ],
)
def test_the_conditions_of_an_operator_are_read_as_a_jobs(
    kind: IndexedJob, conditions: list | None, state: str
) -> None:
    made = kind.objects(group())[-1][1]
    if conditions is not None:
        made["status"] = {"conditions": conditions}
    job = kind.as_job(made)
    outcome = judge_pods(job, [], {}, NOW)
    assert outcome.state == state
    if state == "failed":
        assert outcome.ended.cause.startswith(conditions[-1]["reason"])
    assert (job["spec"]["completions"], job["metadata"]["name"]) == (2, "attempt-1")
    assert bool(job["spec"]["suspend"]) is False


def test_a_queue_can_suspend_an_operators_object(kind: IndexedJob) -> None:
    made = kind.objects(group())[-1][1]
    made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "q"
    (made["spec"]["runPolicy"] if kind is PYTORCHJOB else made["spec"])["suspend"] = True
    job = kind.as_job(made)
    assert judge_pods(job, [], {0: pod(0), 1: pod(1)}, NOW).state == "waiting"
    assert explain(job, [], ClusterState()).why == "its Job is suspended, until queue q admits it"


def of_kind(kind: IndexedJob, made: dict) -> dict:
    """Return a pod with the labels that an operator gives it beside ours."""
    number = str(node_of(made))
    made["metadata"]["labels"] = {GROUP: "attempt-1"} | (
        {"training.kubeflow.org/job-name": "attempt-1", "training.kubeflow.org/replica-index": number}
        if kind is PYTORCHJOB
        else {
            "jobset.sigs.k8s.io/jobset-name": "attempt-1",
            "job-name": "attempt-1-node-0",
            "batch.kubernetes.io/job-completion-index": number,
        }
    )
    made["status"]["containerStatuses"][0]["name"] = kind.container
    return made


def test_an_operators_pods_are_known_by_their_labels(kind: IndexedJob) -> None:
    made = of_kind(kind, pod(3, "Failed", 7))
    assert (job_of(made), node_of(made), rule_container(made)) == ("attempt-1", 3, kind.container)
    assert terminated(made)["exitCode"] == 7
    assert rule_container(pod(0)) == "snakemake"
    assert job_of(pod(0)) == "j"


def again(made: dict, uid: str = "2") -> dict:
    return made | {"metadata": made["metadata"] | {"uid": uid}}


def test_a_group_in_which_a_pod_was_made_again_ends() -> None:
    """As the Training Operator does with a pod that is deleted before it runs."""
    job = PYTORCHJOB.as_job(PYTORCHJOB.objects(group())[-1][1])
    seen = newest_seen(job, [again(pod(0), "0"), again(pod(1, "Pending"), "1")], {})
    now = [again(pod(0), "0"), again(pod(1), "2")]
    for _ in range(2):
        outcome = judge_pods(job, now, seen, NOW)
        assert (outcome.state, outcome.ended.taken_away, outcome.runs_on) == ("ending", True, True)
        assert outcome.ended.cause == "pod 1: its pod was removed: evicted, or deleted by hand"
        seen = newest_seen(job, now, seen)
    # Then the executor deletes it, and its pods end.
    gone = judge_pods(None, [], seen, NOW)
    assert (gone.state, gone.ended.taken_away, gone.runs_on) == ("failed", True, False)


def test_a_pod_that_a_queue_or_its_success_ended_may_come_again() -> None:
    job = PYTORCHJOB.as_job(PYTORCHJOB.objects(group())[-1][1])
    now = [again(pod(0), "0"), again(pod(1), "2")]
    assert judge_pods(job, now, {0: now[0], 1: again(pod(1, "Succeeded", 0), "1")}, NOW).state == "running"
    suspended = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T11:30:00Z"}
    job["status"]["conditions"] = [suspended]
    for each in now:
        each["metadata"]["creationTimestamp"] = "2026-11-21T11:31:00Z"
    before = {number: again(pod(number), "1") for number in (0, 1)}
    assert judge_pods(job, now, before, NOW).state == "running"
    assert newest_seen(job, now, before) == dict(enumerate(now))


def test_the_executor_deletes_a_group_that_runs_on() -> None:
    executor, deleted = object.__new__(HardenedExecutor), []
    outcome = Outcome("ending", "p", runs_on=True)
    executor._disruptions = SimpleNamespace(resting=lambda name: False, create_due=lambda name: name)
    executor._watch = SimpleNamespace(look_patiently=lambda names, warn: dict.fromkeys(names, outcome))
    executor.logger = SimpleNamespace(warning=print)
    executor.cluster = SimpleNamespace(delete_job=deleted.append)
    info = SimpleNamespace(external_jobid="j")

    async def look() -> list:
        return [info async for info in executor.check_active_jobs([info])]

    assert asyncio.run(look()) == [info]
    assert deleted == ["j"]


def rights(asked: list[str]) -> set[tuple[str, str, str]]:
    """Return the rights that some requests need: group, resource, verb."""
    verbs = {"POST": "create", "GET": "list", "DELETE": "delete"}
    found = set()
    for each in asked:
        verb, _, path = each.partition(" ")
        words = path.partition("?")[0].strip("/").split("/")
        group, at = ("", 4) if words[0] == "api" else (words[1], 5)
        found.add((group, words[at], verbs[verb]))
    return found


def test_the_rights_of_a_kind_are_those_that_it_uses(kind: IndexedJob, server: BadMinutes) -> None:
    cluster = namespace(kind)
    cluster.create_job(group())
    assert server.asked == [f"POST {HERE.format(kind.api, plural)}" for plural in kind.plurals], "no Service, no Job"
    cluster.jobs("a=b")
    cluster.delete_job("attempt-1")
    left = [{"metadata": {"name": "left"}}]
    server.answers = [(200, {"items": left}, {})]
    cluster.delete_rest("a=b")
    wanted = {(right.group, right.resource, right.verb) for right in objects.GROUPS[kind.name]}
    jobs = {("batch", "jobs", "list"), ("batch", "jobs", "delete")}
    assert rights(server.asked) == wanted | jobs
    component = yaml.safe_load((ROOT / "k8s/components" / COMPONENTS[kind.name] / "kustomization.yaml").read_text())
    (patch,) = component["patches"]
    (added,) = (each["value"] for each in yaml.safe_load(patch["patch"]))
    granted = {
        (name, resource, verb)
        for name in added["apiGroups"]
        for resource in added["resources"]
        for verb in added["verbs"]
    }
    assert granted == wanted


def test_a_trainjob_ends_before_its_runtime(server: BadMinutes) -> None:
    """Trainer would make the JobSet of a TrainJob again that is kept until its pods are gone."""
    namespace(TRAINJOB).delete_job("j", after_its_pods=True)
    api = TRAINJOB.api
    assert server.asked == [
        "DELETE /apis/batch/v1/namespaces/here/jobs/j",
        f"DELETE {HERE.format(api, 'trainjobs')}/j",
        f"DELETE {HERE.format(api, 'trainingruntimes')}/j",
    ]


MUST = (
    'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: Invalid value: '
    "x: specified trainingRuntime must be created before the TrainJob is created"
)
AWAY = 'Internal error occurred: failed calling webhook "validator.trainjob.trainer.kubeflow.org": no endpoints'


@pytest.mark.parametrize(("code", "why"), [(403, MUST), (500, AWAY)])
def test_a_passing_refusal_leaves_nothing_and_is_repeated_with_all_objects(
    server: BadMinutes, code: int, why: str
) -> None:
    cluster, now = namespace(TRAINJOB), 0.0
    watch = Watch(cluster, "", print)
    disruptions = Disruptions(cluster, watch, lambda: now)
    server.answers = [(200, {}, {}), (code, {"kind": "Status", "reason": "Forbidden", "message": why}, {})]
    disruptions.create(shaped(2) | {"metadata": {"name": "j", "labels": {}}}, RuleJob("train_model", {}, nodes=2), None)
    assert [each for each in server.asked if each.startswith("DELETE") and "trainingruntimes/j" in each]
    outcome = watch.look(["j"])["j"]
    planned = disruptions.plan("j", outcome)
    assert (planned.state, outcome.ended.taken_away) == ("waiting", True)
    assert why in planned.ended.cause
    server.asked.clear()
    now = 100.0
    assert disruptions.create_due("j") == "j-2"
    assert server.asked == [f"POST {HERE.format(TRAINJOB.api, plural)}" for plural in TRAINJOB.plurals]


def test_a_later_attempt_has_a_name_that_jobset_takes(server: BadMinutes) -> None:
    cluster, now = namespace(TRAINJOB), 0.0
    disruptions = Disruptions(cluster, Watch(cluster, "", print), lambda: now)
    name = "snakejob-3f0c9d5e-8a55-5f0e-9f4e-1c7d8a9b0c1d"
    body = shaped(2) | {"metadata": {"name": name, "labels": {}}}
    disruptions.create(body, RuleJob("train_model", {}, nodes=2), None)
    for _ in range(1000):
        disruptions.plan(name, Outcome("failed", "p", Ended("preempted", "preempted"), incomplete=True))
        now += 10_000
        name = disruptions.create_due(name)
    assert name.endswith("-1001")
    assert len(f"{name}-node-0-99-abcde") <= 63


ENDS = {"metadata": {"name": "attempt-1", "labels": {"vlmflow/rule": "train_model"}}, "spec": {"runtimeRef": {}}}


def test_the_shutdown_finds_groups_and_what_is_left_of_them(server: BadMinutes) -> None:
    cluster, lines = namespace(TRAINJOB), []
    nothing, runtime = (200, {"items": []}, {}), {"metadata": {"name": "left"}}
    server.answers = [nothing, (200, {"items": [ENDS]}, {}), nothing, *[(200, {}, {})] * 3, *[nothing] * 3]
    server.answers.append((200, {"items": [runtime]}, {}))
    assert end_all(cluster, "a=b", "Stopping.", lines.append) == set()
    assert lines == ["Stopping. Ending 1 Job; their pods save their work first: train_model."]
    deleted = [each.rpartition("/")[2] for each in server.asked if each.startswith("DELETE")]
    assert deleted == ["attempt-1"] * 3 + ["left"]


def test_a_strangers_group_is_named_with_the_command_that_deletes_it(server: BadMinutes) -> None:
    server.answers = [(200, {"items": []}, {}), (200, {"items": [ENDS]}, {})]
    with pytest.raises(VlmflowError) as error:
        refuse_strangers(namespace(TRAINJOB), "a=b")
    assert "kubectl -n here delete jobs,trainjobs.trainer.kubeflow.org -l 'a=b'" in str(error.value)


def test_the_cluster_says_where_the_operator_cannot_create_a_pod(kind: IndexedJob) -> None:
    job = kind.as_job(kind.objects(group())[-1][1])
    for place, name, reason in kind.refused_at("attempt-1"):
        about = {"kind": place, "name": name}
        event = {
            "involvedObject": about,
            "reason": reason,
            "message": 'Error creating: pods "x" is forbidden: violates PodSecurity',
        }
        found = explain(job, [], ClusterState([], [event]))
        assert found.why == '0 of its 2 pods exist: its pod is refused: pods "x" is forbidden: violates PodSecurity'
        assert found.hopeless_after == 0.0
    assert (
        explain(job, [], ClusterState()).why == f"0 of its 2 pods exist: its pod is not created yet by {kind.operator}"
    )


def served(kind: IndexedJob, *plurals: str) -> list[tuple[int, dict, dict]]:
    group, _, version = kind.api.partition("/")
    return [
        (200, {"name": group, "versions": [{"groupVersion": kind.api, "version": version}]}, {}),
        (200, {"resources": [{"name": plural} for plural in plurals]}, {}),
    ]


def test_a_cluster_without_the_operator_is_refused(kind: IndexedJob, server: BadMinutes) -> None:
    api, absent = Api(connect(print, patience=0.0), "here"), refusal(404, "NotFound")
    server.answers = served(kind, *kind.plurals, "others")
    check_served(api, kind)
    check_served(api, INDEXED_JOB)
    assert server.asked == [f"GET /apis/{kind.api.partition('/')[0]}", f"GET /apis/{kind.api}"]
    group = kind.api.partition("/")[0]
    for answers, why in (
        ([absent, absent], f"does not serve {group}, and has no"),
        ([(200, {"versions": [{"version": "v3"}]}, {}), absent], f"serves {group} in v3, and has no"),
        (served(kind, "mpijobs"), "and has no"),
    ):
        server.answers = answers
        with pytest.raises(VlmflowError, match=f"cluster.multi_node is {kind.name}: the cluster .*{why}") as error:
            check_served(api, kind)
        assert kind.operator in error.value.next_step
        assert "multi_node: indexed_job" in error.value.next_step
