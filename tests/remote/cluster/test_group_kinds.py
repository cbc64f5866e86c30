"""The executor's view of a group that an operator runs: its state, its cause of failure, and its end."""

import time
from collections.abc import Iterator

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

NAMESPACE, NAME, OURS = "vlmflow-kinds", "attempt-1", "test=kinds"
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
    check_served(Api(client, NAMESPACE), request.param)
    with cluster.having(a_namespace(NAMESPACE, labels)):
        yield Namespace(client, NAMESPACE, request.param)


def create(namespace: Namespace, command: str, resources: dict[str, str], **container: object) -> Watch:
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
    return [one["metadata"]["name"] for kind in kinds for one in cluster.get(kind, namespace=NAMESPACE)["items"]]


def test_a_group_runs_and_ends_with_all_that_it_had(cluster: Cluster, namespace: Namespace) -> None:
    watch = create(namespace, SLEEPS, SMALL)
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
    watch = create(namespace, f'[ "$JOB_COMPLETION_INDEX" != {node} ] || {{ sleep 2; exit 3; }}; {SLEEPS}', SMALL)
    outcome = look_for(watch, "failed")
    assert (outcome.ended.cause, outcome.ended.taken_away) == (f"pod {node}: ended with exit code 3", False)
    namespace.delete_job(NAME)
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


def test_node_0_decides_that_it_succeeded(cluster: Cluster, namespace: Namespace) -> None:
    watch = create(namespace, f'[ "$JOB_COMPLETION_INDEX" = 0 ] && {{ sleep 2; exit 0; }}; {SLEEPS}', SMALL)
    look_for(watch, "succeeded")
    namespace.delete_job(NAME)
    wait_for("nothing is left", lambda: left(cluster, namespace) == [], 30)


@pytest.mark.parametrize("resources", [SMALL, SMALL | {"cpu": "1000"}], ids=["running", "pending"])
def test_a_deleted_pod_disrupts_the_group(cluster: Cluster, namespace: Namespace, resources: dict) -> None:
    """The Training Operator makes one again that did not run."""
    watch = create(namespace, SLEEPS, resources)
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
    create(namespace, SLEEPS, SMALL, securityContext={"privileged": True})

    def refused() -> bool:
        (job,) = namespace.jobs(OURS)
        found = explain(job, [], ClusterState([], namespace.events()))
        assert found.why.startswith("0 of its 2 pods exist: its pod is ")
        return "violates PodSecurity" in found.why and found.hopeless_after == 0.0

    wait_for("the refusal is shown", refused, 30)
    namespace.delete_job(NAME)
