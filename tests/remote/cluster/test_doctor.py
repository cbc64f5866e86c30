"""The doctor on a real cluster: what is right, and what is broken on purpose."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import images
from cluster.addons import start_dns
from cluster.cluster import Cluster
from cluster.deployment import deployed, having_given
from cluster.kubectl import Kubectl, client_of
from cluster.paths import STATE
from cluster.shell import wait_for
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes import inside
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.needs import Need
from vlmflow.remote.kubernetes.objects import EXECUTOR
from vlmflow.remote.kubernetes.templates import templates_of

ROOT = Path(__file__).parents[3]
NAMESPACE = "vlmflow-doctor"
DOCTOR = [sys.executable, "-m", "vlmflow.command", "doctor"]
GIVEN = {"ResourceQuota", "LimitRange"}
"""Objects that a namespace gets from the cluster's administrators, like the namespace itself."""


@pytest.fixture(scope="module")
def volumes() -> Path:
    return STATE / "volumes" / NAMESPACE


@pytest.fixture(scope="module")
def ready(any_cluster: Kubectl, volumes: Path) -> Iterator[Kubectl]:
    """A cluster with everything that overlays/local makes, and both images."""
    if isinstance(any_cluster, Cluster):
        for target in images.TARGETS:
            any_cluster.carry_in(images.project_image(target))
    with deployed(any_cluster, NAMESPACE, volumes):
        yield any_cluster


@pytest.fixture
def cpu_run(tmp_path: Path) -> Path:
    """A configuration whose run fits on this machine and fetches nothing."""
    file = tmp_path / "my-run.yaml"
    models = {"tiny": {"source": "/cache/tiny", "model_type": "qwen3_vl"}}
    data = {"fire": {"train": "/cache/train.json", "test": "/cache/test.json"}}
    run = {"model": "tiny", "device": "cpu", "processes": 2, "strategy": "ddp", "resources": {"train_mem_mb": 2000}}
    file.write_text(json.dumps({"models": models, "datasets": data, "runs": {"qwen3vl-fire": run}}))
    return file


def as_account(cluster: Kubectl, namespace: str, name: str, kubeconfig: Path) -> Path:
    """Write a kubeconfig that authenticates as a service account."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", name, f"--namespace={namespace}").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig.write_text(yaml.safe_dump(config))
    return kubeconfig


def controller_stands(cluster: Kubectl, namespace: str) -> None:
    words = ("rollout", "status", "deployment/controller", "--timeout=240s")
    cluster.kubectl(f"--namespace={namespace}", *words)


def without_podtemplates(found: dict) -> dict:
    """Return an object; a Role without the right that ClusterRole `admin` may not grant, as in overlays/nautilus."""
    rules = [rule for rule in found.get("rules", []) if rule["resources"] != ["podtemplates"]]
    return found | {"rules": rules} if found["kind"] == "Role" else found


def doctor(cluster: Kubectl, *options: object, namespace: str = NAMESPACE) -> tuple[int, dict[str, dict]]:
    """Run the doctor; return its exit code, and its checks by name."""
    command = [*DOCTOR, "--namespace", namespace, "--json", *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "KUBECONFIG": str(cluster.kubeconfig)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("{"), ended.stderr
    said = json.loads(ended.stdout)
    assert said["ready"] == (ended.returncode == 0)
    return ended.returncode, {check["what"]: check for check in said["checks"]}


def test_a_cluster_with_everything_is_ready(ready: Kubectl, cpu_run: Path, volumes: Path) -> None:
    controller_stands(ready, NAMESPACE)
    code, checks = doctor(ready, cpu_run, "--run", "qwen3vl-fire", "--max-threads", 2)
    assert code == 0, [check for check in checks.values() if check["state"] == "fail"]
    assert {check["state"] for check in checks.values()} <= {"ok", "warn"}
    assert checks["volume /outputs"]["found"] == "writable as user 1000, with locks, links and renamed folders"
    assert "volumes, two nodes" in checks
    assert "packages match envs/data.lock" in checks["image data"]["found"]
    assert "packages match envs/train.lock" in checks["image train"]["found"]
    assert "2 processes on CPU over gloo" in checks["training together"]["found"]
    assert list((volumes / "outputs").glob(".doctor*")) == []
    left = ready.get("jobs", namespace=NAMESPACE, labels="app.kubernetes.io/component=doctor")["items"]
    assert [job for job in left if "deletionTimestamp" not in job["metadata"]] == []


@pytest.mark.slow
def test_the_trial_runs_on_as_many_nodes_as_a_run(cluster: Cluster, ready: Kubectl) -> None:
    start_dns(cluster)
    cluster.add_node()
    cluster.carry_in(images.project_image("train"))
    namespace = Namespace(client_of(cluster.kubeconfig), NAMESPACE)
    templates = {template["metadata"]["name"]: template for template in templates_of(namespace)}
    need = Need("r", 1, 0, (RuleJob("train_model", mem_mb=2000, disk_mb=1000, template="train", nodes=2),), 2)
    check = inside.check_training(inside.train_together(namespace, templates, [need], 0).answer(180))
    assert check.state == "ok", check
    assert check.found.startswith("2 nodes, 2 processes on CPU over gloo: ")
    assert check.found.endswith(" GB/s between nodes")


@pytest.mark.slow
def test_a_namespace_administrator_is_ready_too(
    any_cluster: Kubectl, cpu_run: Path, volumes: Path, tmp_path: Path
) -> None:
    """With Kubernetes' own ClusterRole `admin` there, without a right to nodes."""
    namespace = f"{NAMESPACE}-admin"
    with having_given(any_cluster, namespace, volumes.with_name(namespace)) as objects:
        any_cluster.apply([one for one in objects if one["kind"] in GIVEN])
        words = ("--clusterrole=admin", f"--serviceaccount={namespace}:researcher", f"--namespace={namespace}")
        any_cluster.kubectl("create", "serviceaccount", "researcher", f"--namespace={namespace}")
        any_cluster.kubectl("create", "rolebinding", "researcher", *words)
        researcher = Kubectl(as_account(any_cluster, namespace, "researcher", tmp_path / "kubeconfig"))
        wait_for("the role is known", lambda: researcher.get("cronjobs", namespace=namespace))
        grantable = [without_podtemplates(one) for one in objects if one["kind"] not in GIVEN]
        researcher.apply(grantable)
        controller_stands(researcher, namespace)
        code, checks = doctor(researcher, cpu_run, "--run", "qwen3vl-fire", namespace=namespace)
    assert code == 0, [check for check in checks.values() if check["state"] == "fail"]
    assert "you have no right to read it" in checks["GPUs"]["found"]
    assert checks["rights, controller"]["found"].startswith(f"all {len(EXECUTOR)} that the executor uses")
    assert checks["pod templates"]["found"] == "answer, default, fetch, gpu, search, train"
    assert "2 processes on CPU over gloo" in checks["training together"]["found"]


def test_broken_parts_are_named(ready: Kubectl, volumes: Path, cluster: Cluster) -> None:
    """A node without GPUs, a volume of another owner, an image of another lock, no quota left."""
    os.chown(volumes / "cache", 0, 0)
    quota = {"spec": {"hard": {"requests.memory": "4Gi"}}}
    ready.kubectl("patch", "resourcequota", "vlmflow", f"--namespace={NAMESPACE}", f"--patch={json.dumps(quota)}")
    path = "/spec/jobTemplate/spec/template/spec/containers/0/image"
    patch = f"--patch={json.dumps([{'op': 'replace', 'path': path, 'value': images.image_name('data')}])}"
    ready.kubectl("patch", "cronjob", "train", f"--namespace={NAMESPACE}", "--type=json", patch)
    try:
        code, checks = doctor(ready, "--run", "qwen3vl-fire")
    finally:
        os.chown(volumes / "cache", 1000, 1000)
    assert code == 1
    assert "it fits on no node" in checks["rule train_model, run qwen3vl-fire"]["found"]
    assert "a run requests 262 GB" in checks["quota"]["found"]
    assert "Permission denied" in checks["volume /cache"]["found"]
    assert "chown" in checks["volume /cache"]["next_step"]
    assert "was built from another envs/train.lock" in checks["image train"]["found"]
    assert checks["training together"]["state"] == "fail"
    assert checks["hub token"]["state"] == "warn"
    assert checks["volume /outputs"]["state"] == "ok"


def test_a_namespace_without_our_objects_says_what_to_apply(any_cluster: Kubectl) -> None:
    command = [*DOCTOR, "--namespace", "vlmflow-absent"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "KUBECONFIG": str(any_cluster.kubeconfig)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "namespace vlmflow-absent does not exist" in ended.stdout
    assert "kubectl apply -k k8s/overlays/NAME" in ended.stdout
    assert "\x1b" not in ended.stdout


def test_no_cluster_at_all_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "KUBECONFIG": str(tmp_path / "none")}
    command = DOCTOR
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no Kubernetes cluster is configured" in ended.stderr
    assert "Traceback" not in ended.stderr
