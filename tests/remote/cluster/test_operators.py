"""Pods that train together under Kubeflow's two operators, in a namespace of the Pod Security Standard `restricted`.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import jobs
from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.deployment import K8S, rendered
from cluster.images import project_image
from cluster.kubectl import a_namespace
from cluster.operators import start_trainer, start_training_operator
from cluster.shell import wait_for

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
