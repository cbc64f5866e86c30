"""Pods that train together under Kubeflow's two operators, and the executor's view of their groups.

Their namespace has the Pod Security Standard `restricted`.

What an operator gives the pods of an object NAME, so that torchrun knows the first pod and its own number:

|                      | PyTorchJob of workers alone        | TrainJob, replicated job `node`                |
|----------------------|------------------------------------|------------------------------------------------|
| pod number I         | NAME-worker-I                      | NAME-node-0-I-xxxxx, host name NAME-node-0-I   |
| address of the first | NAME-worker-0                      | NAME-node-0-0.NAME                             |
| label with I         | training.kubeflow.org/replica-index | batch.kubernetes.io/job-completion-index      |
| label with NAME      | training.kubeflow.org/job-name     | jobset.sigs.k8s.io/jobset-name                 |
| headless Services    | one for each pod, with its name    | NAME, which publishes pods that are not ready  |
| conditions           | Created, Running, Succeeded, Failed | Complete, Failed                              |

The pods read their number from the label: a PyTorchJob gives it as a variable only beside a Master (RANK), a TrainJob
does (JOB_COMPLETION_INDEX). A pod that fails, or is deleted while it runs, makes the condition Failed; the operator
then deletes the pods that still run, and keeps the failed one. A PyTorchJob makes a pod again that was deleted before
it ran or after it succeeded: its uid tells. A TrainJob has no condition while it runs.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import jobs
from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.deployment import K8S, rendered
from cluster.images import project_image
from cluster.kubectl import a_namespace, client_of
from cluster.operators import start_trainer, start_training_operator
from cluster.shell import wait_for
from vlmflow.remote.cluster.api import Api
from vlmflow.remote.cluster.groups import PYTORCHJOB, TRAINJOB, as_attempt, check_served, node_of, with_pods
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.namespace import Namespace, end_all
from vlmflow.remote.kubernetes.outcome import Outcome
from vlmflow.remote.kubernetes.waiting import ClusterState, explain
from vlmflow.remote.kubernetes.watch import Watch

pytestmark = pytest.mark.slow

NAMESPACE, GROUP, PORT = "vlmflow-operators", "attempt-1", 29500
PODS = 2
WORKER = Path(__file__).with_name("group_worker.py").read_text()
LABELS = {"vlmflow/group": GROUP}
RUNS_ON = "trap 'exit 143' TERM; sleep 600 & wait"  # the first process of a pod ignores SIGTERM otherwise
TRAINER = "trainer.kubeflow.org"
CREATOR = f"system:serviceaccount:{NAMESPACE}:creator"


@dataclass(frozen=True)
class Kind:
    """An operator's kind of object. container, number, first, success: what the table above has for it."""

    name: str
    start: Callable[[Cluster], None]
    objects: Callable[[dict], list[dict]]
    container: str
    number: str
    first: str
    success: str


def pytorchjob(pods: dict) -> list[dict]:
    """Return a PyTorchJob of workers alone: beside a Master, each worker gets a container that `restricted` refuses."""
    worker = {"replicas": PODS, "restartPolicy": "Never", "template": pods}
    # Without this policy the other pods would run on after a failure.
    spec = {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": {"Worker": worker}}
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": GROUP}, "spec": spec}]


def trainjob(pods: dict) -> list[dict]:
    """Return a TrainingRuntime that holds everything, and its TrainJob: neither needs an administrator."""
    job = {"backoffLimit": 0, "template": pods}
    labels = {f"{TRAINER}/trainjob-ancestor-step": "trainer"}
    nodes = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": job}}
    runtime = {"mlPolicy": {"numNodes": PODS}, "template": {"spec": {"replicatedJobs": [nodes]}}}
    specs = {
        "TrainingRuntime": runtime,
        "TrainJob": {"runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": GROUP}},
    }
    common = {"apiVersion": f"{TRAINER}/v1alpha1", "metadata": {"name": GROUP}}
    return [{**common, "kind": kind, "spec": spec} for kind, spec in specs.items()]


KINDS = [
    Kind(
        "pytorchjob",
        start_training_operator,
        pytorchjob,
        container="pytorch",
        number="training.kubeflow.org/replica-index",
        first=f"{GROUP}-worker-0",
        success="Succeeded",
    ),
    Kind(
        "trainjob",
        start_trainer,
        trainjob,
        container="node",
        number="batch.kubernetes.io/job-completion-index",
        first=f"{GROUP}-node-0-0.{GROUP}",
        success="Complete",
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Kind]:
    """Return an operator's kind, with the operator running, two nodes, and a namespace whose CREATOR may use it."""
    start_dns(cluster)
    request.param.start(cluster)
    cluster.add_node()
    cluster.carry_in(project_image("train"))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    with cluster.having(a_namespace(NAMESPACE, labels)):
        cluster.apply(rights(), NAMESPACE)
        yield request.param


def rights() -> list[dict]:
    """Return all that a controller needs that makes such groups, watches and ends them."""
    verbs = ["create", "get", "list", "delete"]
    rules = [
        {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": verbs},
        {"apiGroups": [TRAINER], "resources": ["trainjobs", "trainingruntimes"], "verbs": verbs},
        {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]},
    ]
    api, meta = "rbac.authorization.k8s.io", {"name": "creator"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "creator"},
            "subjects": [{"kind": "ServiceAccount", "name": "creator", "namespace": NAMESPACE}],
        },
    ]


def as_creator(cluster: Cluster, *words: object, input: str | None = None) -> str:
    return cluster.kubectl(*words, f"--namespace={NAMESPACE}", f"--as={CREATOR}", input=input)


def create(cluster: Cluster, kind: Kind, command: str) -> None:
    """Create the objects of a group whose pods run a command, each on another node, none with a token of the API."""
    apart = {"labelSelector": {"matchLabels": LABELS}, "topologyKey": "kubernetes.io/hostname"}
    pods = jobs.job(
        GROUP,
        ["/bin/sh", "-c", command],
        project_image("train"),
        {"cpu": "400m", "memory": "1Gi"},
        securityContext={"runAsUser": jobs.USER},
        automountServiceAccountToken=False,
        affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
    )["spec"]["template"]
    pods["metadata"] = {"labels": LABELS}
    fields = {"POD_NAME": "metadata.name", "NUMBER": f"metadata.labels['{kind.number}']"}
    from_fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    pods["spec"]["containers"][0] |= {
        "name": kind.container,
        "env": [{"name": "WORKER", "value": WORKER}, *from_fields],
    }
    for one in kind.objects(pods):

        def created(one: dict = one) -> bool:
            """Say that it is; a TrainJob is refused until Trainer has seen the runtime that was made before it."""
            as_creator(cluster, "create", "--filename=-", input=json.dumps(one))
            return True

        wait_for(f"the {one['kind']} is created", created, 10)


def end_of(cluster: Cluster, kind: Kind) -> str:
    """Wait until a group has ended, and return the condition that says so."""

    def ended() -> str | None:
        found = json.loads(as_creator(cluster, "get", kind.name, GROUP, "--output=json")).get("status", {})
        true = {each["type"] for each in found.get("conditions", ()) if each["status"] == "True"}
        return next(iter(true & {kind.success, "Failed"}), None)

    return str(wait_for("the group ends", ended, 120, pause=0.2))


def pods_of(cluster: Cluster) -> dict[str, dict]:
    """Return the group's pods by name."""
    return {pod["metadata"]["name"]: pod for pod in cluster.get("pods", namespace=NAMESPACE)["items"]}


def running(cluster: Cluster) -> dict[str, dict]:
    """Return the group's pods when all run, nothing before."""
    pods = pods_of(cluster)
    return pods if [pod["status"]["phase"] for pod in pods.values()] == ["Running"] * PODS else {}


def test_two_pods_on_two_nodes_sum_up(cluster: Cluster, kind: Kind) -> None:
    torchrun = (
        f"exec python -m torch.distributed.run --nnodes={PODS} --nproc-per-node=1 --node-rank=$NUMBER "
        f"--rdzv-backend=c10d --rdzv-id={GROUP} --rdzv-endpoint={kind.first}:{PORT} --no-python "
        'python -c "$WORKER"'
    )
    create(cluster, kind, torchrun)
    how = end_of(cluster, kind)
    pods = pods_of(cluster)
    logs = {name: as_creator(cluster, "logs", name) for name in pods}
    assert how == kind.success, logs
    said = [json.loads(line) for log in logs.values() for line in log.splitlines() if line.startswith("{")]
    assert sorted((one["rank"], one["sum"]) for one in said) == [(0, 3.0), (1, 3.0)], logs
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == PODS
    assert not any(pod["spec"].get("volumes") for pod in pods.values()), "no token"
    addresses = {pod["status"]["podIP"] for pod in pods.values()}
    assert {ip for one in said for ip, _ in one["connections"]} <= addresses


@pytest.mark.parametrize("number", range(PODS))
def test_a_failed_pod_ends_the_group_and_none_starts_again(cluster: Cluster, kind: Kind, number: int) -> None:
    create(cluster, kind, f'[ "$NUMBER" != {number} ] || {{ sleep 2; exit 3; }}; {RUNS_ON}')
    before = wait_for("all pods run", lambda: running(cluster))
    assert end_of(cluster, kind) == "Failed"
    wait_for("one pod is left", lambda: len(pods_of(cluster)) == 1)
    (failed,) = pods_of(cluster).values()
    assert failed["metadata"]["labels"][kind.number] == str(number)
    assert failed["metadata"]["uid"] == before[failed["metadata"]["name"]]["metadata"]["uid"]
    assert failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_a_deleted_pod_ends_the_group_and_none_starts_again(cluster: Cluster, kind: Kind) -> None:
    create(cluster, kind, RUNS_ON)
    pods = wait_for("all pods run", lambda: running(cluster))
    cluster.kubectl("delete", "pod", next(iter(pods)), f"--namespace={NAMESPACE}", "--wait=false")
    assert end_of(cluster, kind) == "Failed"
    wait_for("no pod is left", lambda: not pods_of(cluster))


def test_the_group_ends_with_its_object(cluster: Cluster, kind: Kind) -> None:
    create(cluster, kind, RUNS_ON)
    wait_for("all pods run", lambda: running(cluster))
    as_creator(cluster, "delete", kind.name, GROUP)
    wait_for("no pod is left", lambda: not pods_of(cluster))


def test_the_api_names_the_versions_of_trainer(cluster: Cluster) -> None:
    start_trainer(cluster)
    served = json.loads(cluster.kubectl("get", "--raw", f"/apis/{TRAINER}"))
    assert [each["version"] for each in served["versions"]] == ["v1alpha1"]
    assert served["preferredVersion"]["groupVersion"] == f"{TRAINER}/v1alpha1"


KINDS_NAMESPACE, NAME, OURS = "vlmflow-kinds", "attempt-1", "test=kinds"
SLEEPS = "trap 'exit 143' TERM; sleep 600 & wait"  # the first process of a pod ignores SIGTERM otherwise
SMALL = {"cpu": "100m", "memory": "100Mi"}


@pytest.fixture(params=[PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Namespace]:
    """Return a namespace of the standard `restricted`, as the executor sees it, with the operator running."""
    start_dns(cluster)
    {PYTORCHJOB: start_training_operator, TRAINJOB: start_trainer}[request.param](cluster)
    cluster.add_node()
    cluster.carry_in(project_image("data"))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    client = client_of(cluster.kubeconfig)
    check_served(Api(client, KINDS_NAMESPACE), request.param)
    with cluster.having(a_namespace(KINDS_NAMESPACE, labels)):
        yield Namespace(client, KINDS_NAMESPACE, request.param)


def create_watched(namespace: Namespace, command: str, resources: dict[str, str], **container: object) -> Watch:
    """Create a group of two pods that run a shell command, and return the watch on it."""
    job = jobs.job(
        NAME,
        ["/bin/sh", "-c", command],
        project_image("data"),
        resources,
        securityContext={"runAsUser": jobs.USER},
        automountServiceAccountToken=False,
    )
    key, _, value = OURS.partition("=")
    job["metadata"]["labels"] = {key: value}
    job["spec"]["template"]["metadata"] = {"labels": {key: value}}
    job["spec"]["template"]["spec"]["containers"][0] |= {"name": "snakemake", **container}
    namespace.create_job(as_attempt(with_pods(job, 2), NAME))
    watch = Watch(namespace, OURS, print)
    watch.follow(NAME, RuleJob("train_model", {}, nodes=2), None)
    return watch


def look_for(watch: Watch, state: str, limit: float = 90.0) -> Outcome:
    """Look every second, as the executor does, until a group has a state."""

    def found() -> Outcome | None:
        outcome = watch.look([NAME])[NAME]
        assert outcome.state == state or outcome.state not in ("succeeded", "failed"), outcome
        return outcome if outcome.state == state else None

    return wait_for(f"the group is {state}", found, limit, pause=1)


def left(cluster: Cluster, namespace: Namespace) -> list[str]:
    """Return everything in the namespace that belongs to groups."""
    kinds = ["pods", "jobs", "services", *namespace.groups.plurals, *["jobsets"] * (namespace.groups is TRAINJOB)]
    return [one["metadata"]["name"] for kind in kinds for one in cluster.get(kind, namespace=KINDS_NAMESPACE)["items"]]


def test_a_group_runs_and_ends_with_all_that_it_had(cluster: Cluster, namespace: Namespace) -> None:
    watch = create_watched(namespace, SLEEPS, SMALL)
    look_for(watch, "running")
    said: list[str] = []
    pods = {pod["metadata"]["name"] for pod in namespace.pods(OURS)}
    begun = time.monotonic()
    assert end_all(namespace, OURS, "Ctrl-C.", said.append) == pods
    assert len(pods) == 2
    assert "Ending 1 Job" in said[0]
    assert time.monotonic() - begun < 40
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


@pytest.mark.parametrize("node", [0, 1])
def test_the_pod_that_failed_is_the_cause(cluster: Cluster, namespace: Namespace, node: int) -> None:
    watch = create_watched(
        namespace, f'[ "$JOB_COMPLETION_INDEX" != {node} ] || {{ sleep 2; exit 3; }}; {SLEEPS}', SMALL
    )
    outcome = look_for(watch, "failed")
    assert (outcome.ended.cause, outcome.ended.taken_away) == (f"pod {node}: ended with exit code 3", False)
    namespace.delete_job(NAME)
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


def test_node_0_decides_that_it_succeeded(cluster: Cluster, namespace: Namespace) -> None:
    watch = create_watched(namespace, f'[ "$JOB_COMPLETION_INDEX" = 0 ] && {{ sleep 2; exit 0; }}; {SLEEPS}', SMALL)
    look_for(watch, "succeeded")
    namespace.delete_job(NAME)
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


@pytest.mark.parametrize("resources", [SMALL, SMALL | {"cpu": "1000"}], ids=["running", "pending"])
def test_a_deleted_pod_disrupts_the_group(cluster: Cluster, namespace: Namespace, resources: dict) -> None:
    """The Training Operator makes one again that did not run."""
    watch = create_watched(namespace, SLEEPS, resources)
    wait_for("both pods are there", lambda: len(namespace.pods(OURS)) == 2)
    if resources == SMALL:
        look_for(watch, "running")
    watch.look([NAME])
    namespace.delete("pods", next(pod["metadata"]["name"] for pod in namespace.pods(OURS) if node_of(pod) == 1))
    if resources != SMALL and namespace.groups is PYTORCHJOB:
        wait_for("the new pod is seen", lambda: watch.look([NAME])[NAME].runs_on)
        namespace.delete_job(NAME)  # as the executor does
    outcome = look_for(watch, "failed")
    assert outcome.ended.taken_away
    assert outcome.ended.cause.endswith(": its pod was removed: evicted, or deleted by hand")
    namespace.delete_job(NAME)
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


def test_refused_pods_are_explained(namespace: Namespace) -> None:
    create_watched(namespace, SLEEPS, SMALL, securityContext={"privileged": True})

    def refused() -> bool:
        (job,) = namespace.jobs(OURS)
        found = explain(job, [], ClusterState([], namespace.events()))
        assert found.why.startswith("0 of its 2 pods exist: its pod is ")
        return "violates PodSecurity" in found.why and found.hopeless_after == 0.0

    wait_for("the refusal is shown", refused, 30)
    namespace.delete_job(NAME)
