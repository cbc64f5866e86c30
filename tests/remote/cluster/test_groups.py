"""Pods that train together: an Indexed Job and a headless Service, under the Pod Security Standard `restricted`.

The tests' network enforces no policy: one test sees which connections such pods make, the others whether the policies
of k8s/ allow these and no more.
"""

import json
from pathlib import Path

import pytest

from cluster import jobs
from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.deployment import K8S, OVERLAYS, rendered, with_instance
from cluster.images import project_image
from cluster.kubectl import a_namespace
from cluster.policies import End, allowed
from cluster.shell import wait_for
from vlmflow.remote.cluster.groups import as_attempt, service_of
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import shape
from vlmflow.remote.kubernetes.templates import read_template, template_in

NAMESPACE, GROUP, PORT = "vlmflow-groups", "attempt-1", 29500
PODS = 2
WORKER = Path(__file__).with_name("group_worker.py").read_text()
LABELS = {"vlmflow/group": GROUP}

DNS, OUTSIDE = "10.96.0.10", "203.0.113.7"
"""Addresses: one for the cluster's DNS, one on the internet."""
RANDOM = (32768, 60999)
"""The first and last port that Linux chooses for a program that names none (net.ipv4.ip_local_port_range)."""

CONNECTIONS = [
    (1, 0, PORT, "TCP"),  # torchrun's rendezvous, and the store of the ranks
    *((1, 0, port, "TCP") for port in RANDOM),  # gloo
    *((0, 1, port, "TCP") for port in RANDOM),
    *((rank, DNS, 53, protocol) for rank in (0, 1) for protocol in ("UDP", "TCP")),
]
"""All connections that two ranks, each a pod, need to sum up once: from, to, port, protocol."""


def service() -> dict:
    """Return the Service that gives each pod of the group its name, also before the pod is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": LABELS}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": GROUP}, "spec": spec}


def group() -> dict:
    """Return the Job of the group's pods: each on another node, each with its own torchrun and one rank."""
    torchrun = (
        f"exec python -m torch.distributed.run --nnodes={PODS} --nproc-per-node=1 --node-rank=$JOB_COMPLETION_INDEX "
        f"--rdzv-backend=static --rdzv-id={GROUP} --rdzv-endpoint={GROUP}-0.{GROUP}:{PORT} --no-python "
        'python -c "$WORKER"'
    )
    apart = {"labelSelector": {"matchLabels": LABELS}, "topologyKey": "kubernetes.io/hostname"}
    made = jobs.job(
        GROUP,
        ["/bin/sh", "-c", torchrun],
        project_image("train"),
        {"cpu": "400m", "memory": "1Gi"},
        subdomain=GROUP,
        securityContext={"runAsUser": jobs.USER},
        automountServiceAccountToken=False,
        affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
    )
    made["spec"] |= {"completions": PODS, "parallelism": PODS, "completionMode": "Indexed"}
    template = made["spec"]["template"]
    template["metadata"] = {"labels": LABELS}
    template["spec"]["containers"][0]["env"] = [
        {"name": "WORKER", "value": WORKER},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    return made


@pytest.mark.slow
def test_two_pods_on_two_nodes_sum_up_and_connect_only_to_each_other(cluster: Cluster) -> None:
    start_dns(cluster)
    cluster.add_node()
    cluster.carry_in(project_image("train"))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    with cluster.having(a_namespace(NAMESPACE, labels)):
        cluster.apply([service(), group()], NAMESPACE)

        def ended() -> bool:
            conditions = cluster.get("job", GROUP, NAMESPACE)["status"].get("conditions", ())
            return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)

        wait_for("the group ends", ended, 400)
        pods = {pod["metadata"]["name"]: pod for pod in cluster.get("pods", namespace=NAMESPACE)["items"]}
        logs = {name: cluster.kubectl("logs", name, f"--namespace={NAMESPACE}") for name in pods}
        said = [json.loads(line) for log in logs.values() for line in log.splitlines() if line.startswith("{")]
        assert sorted((one["rank"], one["sum"]) for one in said) == [(0, 3.0), (1, 3.0)], logs
        assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == PODS
        ranks = {pods[one["pod"]]["status"]["podIP"]: one["rank"] for one in said}
        seen = {(one["rank"], ranks.get(ip, ip), port) for one in said for ip, port in one["connections"]}
        assert (1, 0, PORT) in seen
        assert {(source, target) for source, target, _ in seen} == {(0, 1), (1, 0)}


def policies_of(objects: list[dict]) -> list[dict]:
    return [one for one in objects if one["kind"] == "NetworkPolicy"]


def pods_of(objects: list[dict]) -> dict[str, dict[str, str]]:
    """Return the labels of the pods that are in no group: the controller's, if there is one, and each template's."""
    found = {}
    for one in objects:
        if one["kind"] in ("Deployment", "CronJob"):
            spec = template_in(one) if one["kind"] == "CronJob" else one["spec"]
            found[one["metadata"]["name"].removesuffix("-ann")] = spec["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("instance", ["", "ann"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_allow_what_a_group_does_and_no_more(overlay: str, instance: str, tmp_path: Path) -> None:
    objects = rendered(with_instance(tmp_path / instance, overlay) if instance else K8S / "overlays" / overlay)
    policies, others = policies_of(objects), pods_of(objects)
    rank = others["gpu"] | LABELS
    ends: dict[int | str, End] = {0: rank, 1: rank, DNS: DNS}
    for source, target, port, protocol in CONNECTIONS:
        assert allowed(policies, ends[source], ends[target], port, protocol), (source, target, port, protocol)
    assert {"answer", "default", "fetch", "train", "gpu"} <= others.keys()
    for name, other in others.items():
        for port in (PORT, 443):
            assert not allowed(policies, rank, other, port), f"to {name}, {port}"
            assert not allowed(policies, other, rank, port), f"from {name}, {port}"
    assert not allowed(policies, rank, rank, PORT, "UDP")
    assert not allowed(policies, OUTSIDE, rank, PORT)
    assert not allowed(policies, rank, OUTSIDE, PORT)
    # In overlays/s3 every pod reaches the storage, for its targets.
    assert allowed(policies, rank, OUTSIDE, 443) == overlay.startswith("s3")
    assert allowed(policies, others["fetch"], OUTSIDE, 443)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_groups_of_two_instances_do_not_reach_each_other(overlay: str, tmp_path: Path) -> None:
    """One of the two has no label, so what its policies select by `part-of` alone is also the other's."""
    both = [rendered(K8S / "overlays" / overlay), rendered(with_instance(tmp_path / "ann", overlay))]
    policies = [policy for objects in both for policy in policies_of(objects)]
    nobodys, anns = (pods_of(objects)["gpu"] | LABELS for objects in both)
    assert not allowed(policies, nobodys, anns, PORT)
    assert not allowed(policies, anns, nobodys, PORT)


def test_a_group_in_a_queue_is_one_that_the_api_server_takes(cluster: Cluster) -> None:
    """With the label of Kueue, which suspends it; Kueue itself has not run. Unknown fields would be refused."""
    gpu = next(one for one in rendered(K8S / "overlays" / "local") if one["metadata"]["name"] == "gpu")
    template = template_in(gpu)
    template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "my-queue"
    container = {
        "name": "snakemake",
        "image": "none:1",
        "args": ["-c", "python -m snakemake --deploy-sources s 0af1 &&"],
    }
    plugins = {"metadata": {}, "spec": {"template": {"spec": {"containers": [container]}}}}
    rule_job = RuleJob("train_model", {"run": "r"}, gpus=8, mem_mb=1_000, nodes=4, runs="/outputs/runs/r")
    job = as_attempt(shape(plugins, read_template(template), rule_job, {}, {}), "queued")
    job |= {"apiVersion": "batch/v1", "kind": "Job"}
    job["spec"]["suspend"] = True
    service = service_of({**job, "metadata": {**job["metadata"], "uid": "0"}})
    with cluster.having(a_namespace(NAMESPACE)):
        for one in (job, service):
            words = ("apply", "--dry-run=server", "--validate=strict", f"--namespace={NAMESPACE}", "--filename=-")
            cluster.kubectl(*words, input=json.dumps(one))
