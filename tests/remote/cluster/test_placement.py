"""Twenty nodes of eight GPUs, simulated by kwok: where the pods of a shared cluster's overlay are placed."""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest

from cluster.addons import fake_node, start_fake_nodes
from cluster.cluster import Cluster
from cluster.deployment import K8S, rendered
from cluster.jobs import shared_volume
from cluster.kubectl import a_namespace
from cluster.paths import STATE
from cluster.shell import wait_for
from vlmflow.remote.cluster.groups import GROUP, as_attempt
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import shape
from vlmflow.remote.kubernetes.templates import Template, read_template, template_in
from vlmflow.remote.kubernetes.waiting import ClusterState, explain

NAMESPACE = "vlmflow-placement"
A100, RACK = "nvidia.com/a100", "topology.kubernetes.io/rack"
GPUS_PER_NODE, GPUS_PER_JOB = 8, 4
NODES = 4
"""Of a training on several nodes."""


@dataclass(frozen=True)
class Kind:
    """Several equal nodes. ours: whether the overlay's pods may use them."""

    count: int
    product: str
    resource: str
    ours: bool
    reserved_for: str = ""


KINDS = {
    "free": Kind(6, "NVIDIA-A100-SXM4-80GB", A100, ours=True),
    "reserved": Kind(4, "NVIDIA-A100-80GB-PCIe", A100, ours=True, reserved_for="my-group"),
    "others": Kind(4, "NVIDIA-A100-SXM4-80GB", A100, ours=False, reserved_for="their-group"),
    "small": Kind(3, "NVIDIA-A100-SXM4-40GB", A100, ours=False),
    "named": Kind(3, "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu", ours=False),
}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[dict[str, str]]:
    """The kind of every fake node, by the node's name."""
    start_fake_nodes(cluster)
    made = {}
    for kind, about in KINDS.items():
        key = "nautilus.io/reservation"
        taint = {"key": key, "value": about.reserved_for, "effect": "NoSchedule"}
        for number in range(about.count):
            name = f"{kind}-{number}"
            labels = {"nvidia.com/gpu.product": about.product, RACK: kind}
            gpus = {about.resource: str(GPUS_PER_NODE)}
            cluster.apply(fake_node(name, gpus, labels, [taint] if about.reserved_for else []))
            made[name] = kind
    yield made
    cluster.kubectl("delete", "node", *made)


@pytest.fixture
def template(cluster: Cluster) -> Iterator[Template]:
    """The overlay's template for GPU rules, in a namespace where its pods can be created."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "vlmflow-job"}}
    stored = [shared_volume(name, STATE / "volumes" / NAMESPACE / name, NAMESPACE) for name in ("cache", "outputs")]
    with cluster.having(a_namespace(NAMESPACE), *(volume for volume, _ in stored)):
        cluster.apply([account, *rendered_templates(), *(claim for _, claim in stored)], NAMESPACE)
        templates = map(template_in, cluster.get("cronjobs", namespace=NAMESPACE)["items"])
        yield next(template for template in map(read_template, templates) if template.name == "gpu")


def rendered_templates() -> list[dict]:
    found = [one for one in rendered(K8S / "overlays" / "nautilus") if one["kind"] == "CronJob"]
    for one in found:
        one["metadata"]["namespace"] = NAMESPACE
    return found


def gpu_pod(name: str, template: Template) -> dict:
    """Return the pod of a Job as the executor creates it, without the Job, which kwok would complete."""
    container = {"name": "snakemake", "image": "none", "command": ["/bin/sh"], "args": ["-c", "true"]}
    plugins = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    rule_job = RuleJob("train_model", {"run": name}, threads=8, mem_mb=200_000, gpus=GPUS_PER_JOB)
    job = as_attempt(shape(plugins, template, rule_job, {"vlmflow/invocation": "placement"}, {}), name)
    return pod_of(job, name)


def refusal(pod: dict) -> str:
    """Return what the scheduler said of a pod when it last refused it."""
    return " ".join(condition.get("message", "") for condition in pod["status"].get("conditions", []))


def pod_of(job: dict, name: str) -> dict:
    """Return a pod of a Job, under a name."""
    pod = deepcopy(job["spec"]["template"])
    pod["metadata"] |= {"name": name, "labels": pod["metadata"]["labels"] | {"job-name": job["metadata"]["name"]}}
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def group_pods(name: str, template: Template) -> list[dict]:
    """Return the pods of a training on NODES nodes, each with all GPUs of one."""
    deploy = "python -m snakemake --deploy-sources s 0af1 && true"
    container = {"name": "snakemake", "image": "none", "command": ["/bin/sh"], "args": ["-c", deploy]}
    plugins = {"metadata": {}, "spec": {"template": {"spec": {"containers": [container]}}}}
    rule_job = RuleJob(
        "train_model", {"run": name}, 8, 200_000, gpus=GPUS_PER_NODE, nodes=NODES, runs="/outputs/runs/r"
    )
    job = as_attempt(shape(plugins, template, rule_job, {"vlmflow/invocation": "placement"}, {}), name)
    return [pod_of(job, f"{name}-{number}") for number in range(NODES)]


def test_jobs_fill_the_nodes_that_they_may_use_and_no_others(
    cluster: Cluster, nodes: dict[str, str], template: Template
) -> None:
    per_node = GPUS_PER_NODE // GPUS_PER_JOB
    room = {kind: about.count * per_node for kind, about in KINDS.items() if about.ours}
    names = [f"job-{number}" for number in range(sum(room.values()) + 2)]
    cluster.apply([gpu_pod(name, template) for name in names], NAMESPACE)

    def placed() -> list[dict]:
        """Return the pods once each has a node, or has none because too few GPUs are free.

        Until their claims are bound, the scheduler refuses them for that; it tries again afterwards.
        """
        pods = cluster.get("pods", namespace=NAMESPACE)["items"]
        settled = [pod for pod in pods if pod["spec"].get("nodeName") or "Insufficient" in refusal(pod)]
        full = sum("nodeName" in pod["spec"] for pod in pods) >= sum(room.values())
        return pods if full and len(settled) == len(names) else []

    pods = wait_for("every pod is placed or refused", placed, 120)
    there = Counter(nodes[pod["spec"]["nodeName"]] for pod in pods if pod["spec"].get("nodeName"))
    assert there == room

    waiting = [pod for pod in pods if not pod["spec"].get("nodeName")]
    assert len(waiting) == 2
    job = {"metadata": {"name": waiting[0]["metadata"]["name"]}, "spec": {}}
    said = explain(job, waiting[:1], ClusterState(pods, [], cluster.get("nodes")["items"])).why
    assert f"{A100}: {GPUS_PER_JOB} asked" in said


def test_the_pods_of_a_training_have_nodes_of_their_own_in_one_rack(
    cluster: Cluster, nodes: dict[str, str], template: Template
) -> None:
    """With the template of the overlay, and the term for a rack that docs/kubernetes.md shows."""
    in_a_rack = {"topologyKey": RACK, "labelSelector": {"matchExpressions": [{"key": GROUP, "operator": "Exists"}]}}
    affinity = template.spec["affinity"] | {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [in_a_rack]}
    }
    there = replace(template, spec=template.spec | {"affinity": affinity})
    cluster.apply(group_pods("group", there), NAMESPACE)

    def placed() -> list[dict]:
        pods = cluster.get("pods", namespace=NAMESPACE)["items"]
        return pods if all(pod["spec"].get("nodeName") for pod in pods) and len(pods) == NODES else []

    pods = wait_for("all pods are placed", placed, 120)
    used = [pod["spec"]["nodeName"] for pod in pods]
    assert len(set(used)) == NODES, "each pod has a node of its own"
    assert len({nodes[node] for node in used}) == 1, "all nodes are in one rack"
