"""Pods that train together: an Indexed Job and a headless Service, under the Pod Security Standard `restricted`."""

import json
from pathlib import Path

from cluster import jobs
from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.deployment import K8S, rendered
from cluster.images import project_image
from cluster.kubectl import a_namespace
from cluster.shell import wait_for

NAMESPACE, GROUP, PORT = "vlmflow-groups", "attempt-1", 29500
PODS = 2
WORKER = Path(__file__).with_name("group_worker.py").read_text()
LABELS = {"vlmflow/group": GROUP}


def service() -> dict:
    """Return the Service that gives each pod of the group its name, also before the pod is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": LABELS}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": GROUP}, "spec": spec}


def group() -> dict:
    """Return the Job of all pods: each on another node, each with one torchrun."""
    torchrun = (
        f"exec python -m torch.distributed.run --nnodes={PODS} --nproc-per-node=1 --node-rank=$JOB_COMPLETION_INDEX "
        f"--rdzv-backend=c10d --rdzv-id={GROUP} --rdzv-endpoint={GROUP}-0.{GROUP}:{PORT} --no-python "
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


def test_two_pods_on_two_nodes_sum_up(cluster: Cluster) -> None:
    start_dns(cluster)
    cluster.add_node()
    cluster.carry_in(project_image("train"))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    with cluster.having(a_namespace(NAMESPACE, labels)):
        cluster.apply([service(), group()], NAMESPACE)

        def ended() -> bool:
            conditions = cluster.get("job", GROUP, NAMESPACE)["status"].get("conditions", ())
            return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)

        wait_for("the group ends", ended, 120)
        pods = cluster.get("pods", namespace=NAMESPACE)["items"]
        logs = {
            pod["metadata"]["name"]: cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={NAMESPACE}")
            for pod in pods
        }
        said = [json.loads(line) for log in logs.values() for line in log.splitlines() if line.startswith("{")]
        assert sorted((one["rank"], one["sum"]) for one in said) == [(0, 3.0), (1, 3.0)], logs
        assert len({pod["spec"]["nodeName"] for pod in pods}) == PODS
        addresses = {pod["status"]["podIP"] for pod in pods}
        to = {each["to"].removeprefix("::ffff:") for one in said for each in one["connections"]}
        print(json.dumps(said, indent=1))
        assert to <= addresses, "only pods of the group are connected"
