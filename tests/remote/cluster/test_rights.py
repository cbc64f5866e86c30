"""Least rights: the controller's account with its Role, with each verb removed, and jobs' account without any."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import kubernetes
import pytest

from cluster.deployment import K8S, rendered, with_component
from cluster.kubectl import Kubectl, a_namespace, client_of
from cluster.shell import wait_for
from vlmflow.remote.cluster.api import Api, Refused
from vlmflow.remote.cluster.groups import PYTORCHJOB, TRAINJOB, IndexedJob
from vlmflow.remote.kubernetes import executor, job_shape, namespace, objects, outcome, templates, waiting, watch
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.objects import EXECUTOR, STORAGE_KEYS, Right
from vlmflow.remote.kubernetes.templates import templates_of

NAMESPACE = "vlmflow-rights"
COMPONENTS = {"pytorchjob": "training-operator", "trainjob": "trainer"}
"""The folder of k8s/components with the controller's rights, by the name of a kind."""
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "absent"}}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "never"}, "spec": {"clusterIP": "None"}}
API_CALL = re.compile(r"\b(?:self|cluster|api)\.(call|get_path|get|list|create|delete|log)\(([^,)]+)")
"""A call of the API in the executor's code, with its first argument."""

CALLS: dict[str, Callable[[Namespace], object]] = {
    "list cronjobs": templates_of,
    "create jobs": lambda cluster: cluster.create_job(job()),
    "list jobs": lambda cluster: cluster.jobs(""),
    "delete jobs": lambda cluster: cluster.delete_job("absent"),
    "create services": lambda cluster: cluster.create("services", SERVICE),
    "list pods": lambda cluster: cluster.pods(),
    "delete pods": lambda cluster: cluster.delete("pods", "absent"),
    "get pods/log": lambda cluster: cluster.log("p", "snakemake"),
    "list events": lambda cluster: cluster.events(),
}
"""What the executor does with each right."""

CALLS_WITH_S3: dict[str, Callable[[Namespace], object]] = {
    "create secrets": lambda cluster: kubernetes.client.CoreV1Api(cluster.client).create_namespaced_secret(
        cluster.namespace, SECRET, dry_run="All"
    ),
    "delete secrets": lambda cluster: cluster.delete("secrets", "absent"),
}
"""What it also does with targets in S3; the controller's account may not."""


def job() -> dict:
    spec = {"restartPolicy": "Never", "containers": [{"name": "snakemake", "image": "none:0"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "never", "namespace": NAMESPACE},
        "spec": {"suspend": True, "template": {"spec": spec}},
    }


@pytest.fixture(scope="module")
def account(any_cluster: Kubectl) -> Iterator[list[dict]]:
    """The accounts and the Role of k8s/base in their own namespace."""
    objects = [one for one in rendered(K8S / "base") if one["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    for one in objects:
        for named in [one["metadata"], *one.get("subjects", [])]:
            named["namespace"] = NAMESPACE
    with any_cluster.having(a_namespace(NAMESPACE)):
        any_cluster.apply(objects)
        yield objects


def client_as(cluster: Kubectl, name: str) -> kubernetes.client.ApiClient:
    client = client_of(cluster.kubeconfig)
    client.set_default_header("Impersonate-User", f"system:serviceaccount:{NAMESPACE}:{name}")
    return client


def refused(call: Callable[[Namespace], object], client: kubernetes.client.ApiClient) -> bool:
    try:
        call(Namespace(client, NAMESPACE))
    except Refused as error:
        return error.status == 403
    return False


def test_the_role_is_enough_for_the_executor(any_cluster: Kubectl, account: list[dict]) -> None:
    client = client_as(any_cluster, "vlmflow-controller")
    # The API server sees roles a moment after their creation.
    wait_for("all rights are there", lambda: objects.missing(Api(client, NAMESPACE), EXECUTOR) == [])
    assert [name for name, call in CALLS.items() if refused(call, client)] == []


def test_the_controller_has_no_right_to_secrets(any_cluster: Kubectl, account: list[dict]) -> None:
    client = client_as(any_cluster, "vlmflow-controller")
    assert all(refused(call, client) for call in CALLS_WITH_S3.values())
    assert [str(right) for right in objects.missing(Api(client, NAMESPACE), STORAGE_KEYS)] == list(CALLS_WITH_S3)


@pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
@pytest.mark.parametrize("overlay", ["local", "nautilus"])
def test_a_component_adds_the_rights_to_a_kind_of_group(kind: IndexedJob, overlay: str, tmp_path: Path) -> None:
    """The operators are not here; tests/remote/unit/kubernetes shows that these rights are enough."""
    made = rendered(with_component(tmp_path / "k8s", overlay, COMPONENTS[kind.name]))
    role = next(one for one in made if one["kind"] == "Role")
    before = next(one for one in rendered(K8S / "overlays" / overlay) if one["kind"] == "Role")
    (added,) = [rule for rule in role["rules"] if rule not in before["rules"]]
    granted = {(added["apiGroups"][0], name, verb) for name in added["resources"] for verb in added["verbs"]}
    assert granted == {(right.group, right.resource, right.verb) for right in objects.GROUPS[kind.name]}
    assert len(role["rules"]) == len(before["rules"]) + 1


@pytest.mark.parametrize("right", EXECUTOR, ids=str)
def test_each_removed_verb_is_missed(any_cluster: Kubectl, account: list[dict], right: Right) -> None:
    role = next(one for one in account if one["kind"] == "Role")
    rules = [
        {"apiGroups": [other.group], "resources": [other.resource], "verbs": [other.verb]}
        for other in EXECUTOR
        if other != right
    ]
    client = client_as(any_cluster, "vlmflow-controller")
    try:
        any_cluster.apply(role | {"rules": rules})
        wait_for(f"{right} is taken away", lambda: objects.missing(Api(client, NAMESPACE), EXECUTOR) == [right])
        assert [name for name, call in CALLS.items() if refused(call, client)] == [str(right)]
    finally:
        any_cluster.apply(role)


def test_job_pods_may_do_nothing(any_cluster: Kubectl, account: list[dict]) -> None:
    client = client_as(any_cluster, "vlmflow-job")
    assert objects.check_job_service_account(Api(client, NAMESPACE)).state == "ok"
    assert all(refused(call, client) for call in (CALLS | CALLS_WITH_S3).values())


def test_the_rights_are_exactly_those_that_the_executor_uses() -> None:
    """The executor calls the API only so: a new call needs a new line in CALLS and in the Role."""
    calls = set()
    for module in (executor, namespace, templates, watch, waiting, outcome, job_shape):
        calls |= set(API_CALL.findall(Path(module.__file__).read_text()))
    assert calls == {
        *(("list", what) for what in ("CRON_JOBS", "JOBS", "path", '"pods"', '"events"')),
        *(("create", what) for what in ("JOBS", "path", '"services"')),
        *(("delete", what) for what in ("JOBS", "path", '"pods"', '"secrets"')),
        *{("call", '"GET"'), ("log", "pod")},
    }
