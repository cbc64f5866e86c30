"""JupyterLab on the cluster, with the demo's results on its volume; test_tensorboard.py tests its objects."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster import images
from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.deployment import PODS_USER, in_namespace, with_component
from cluster.paths import STATE
from workflow_runs import RUN

NAMESPACE = "vlmflow-jupyter"

pytestmark = pytest.mark.slow  # its image takes two minutes


@pytest.fixture(scope="module")
def pod(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a ready pod with the demo's targets in its volume."""
    cluster.carry_in(images.project_image("jupyter"))
    volumes = STATE / "volumes" / NAMESPACE
    shutil.rmtree(volumes, ignore_errors=True)
    for name in ("cache", "outputs/targets", "controller-state"):
        (volumes / name).mkdir(parents=True)
    for name in ("data", "fitted", "lengths", "checkpoints", "verified"):
        shutil.copytree(demo / name, volumes / "outputs" / "targets" / name)
    for place in [volumes / "outputs", *(volumes / "outputs").rglob("*")]:
        os.chown(place, PODS_USER, PODS_USER, follow_symlinks=False)
    overlay = with_component(tmp_path_factory.mktemp("k8s"), "local", "jupyter")
    objects = in_namespace(cluster, NAMESPACE, volumes, overlay=overlay)
    without = [one for one in objects if (one["kind"], one["metadata"]["name"]) != ("Deployment", "controller")]
    with cluster.having(*(one for one in without if "namespace" not in one["metadata"])):
        cluster.apply([one for one in without if "namespace" in one["metadata"]])
        cluster.kubectl(f"--namespace={NAMESPACE}", "rollout", "status", "deployment/jupyter", "--timeout=240s")
        (found,) = cluster.get("pods", namespace=NAMESPACE, labels="app.kubernetes.io/name=jupyter")["items"]
        yield found["metadata"]["name"]


def in_pod(cluster: Cluster, command: str) -> str:
    words = ("exec", "deployment/jupyter", "--", "sh", "-c", f"{command} 2>&1 || true")
    return cluster.kubectl(f"--namespace={NAMESPACE}", *words)


@contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """Forward a free port of this machine to the Service, as docs/kubernetes.md says; yield its address."""
    words = [binary("kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}"]
    process = subprocess.Popen([*words, "port-forward", "service/jupyter", ":8888"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield f"http://{process.stdout.readline().split()[2]}"
    finally:
        process.terminate()
        process.wait()


def test_only_its_token_opens_it(cluster: Cluster, pod: str) -> None:
    token = in_pod(cluster, "cat /tmp/token").strip()
    assert len(token) == 64
    assert token not in cluster.kubectl(f"--namespace={NAMESPACE}", "logs", pod)
    with forwarded(cluster) as address:
        assert httpx.get(f"{address}/api/contents", timeout=60).status_code == 403
        assert httpx.post(f"{address}/api/kernels", timeout=60).status_code == 403
        known = {"headers": {"Authorization": f"token {token}"}, "timeout": 60}
        listed = httpx.get(f"{address}/api/contents", **known).raise_for_status().json()
        assert [one["name"] for one in listed["content"]] == ["look.ipynb"]


def test_its_notebook_shows_the_results_on_the_volume(cluster: Cluster, pod: str) -> None:
    said = in_pod(
        cluster,
        f"cd /tmp && VLMFLOW_RUN={RUN} jupyter nbconvert --to notebook --execute --stdout --log-level=ERROR "
        "notebooks/look.ipynb",
    )
    cells = json.loads(said[said.index("{\n") :])["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert f"run {RUN} in /outputs/targets" in text
    assert "the gate is open" in text
    assert "not evaluated" in text
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 3


def test_its_pod_can_write_nothing_and_has_no_token(cluster: Cluster, pod: str) -> None:
    assert "Read-only file system" in in_pod(cluster, "touch /outputs/targets/new")
    assert "Read-only file system" in in_pod(cluster, "touch /cache/new")
    assert "Read-only file system" in in_pod(cluster, "touch /opt/vlmflow/notebooks/new")
    assert "No such file" in in_pod(cluster, "ls /var/run/secrets/kubernetes.io")
    assert in_pod(cluster, "id -u").strip() == "1000"
