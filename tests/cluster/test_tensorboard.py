"""TensorBoard on the cluster, with the demo's trainings on its volume."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster import images
from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.deployment import K8S, OVERLAYS, PODS_USER, in_namespace, rendered, with_component, with_instance
from cluster.kubectl import Kubectl, a_namespace
from cluster.paths import STATE
from workflow_runs import RUN

NAMESPACE = "vlmflow-tensorboard"
OWN_IMAGES = [name for name in OVERLAYS if "\nimages:" in (K8S / f"overlays/{name}/kustomization.yaml").read_text()]
"""The overlays that name the images; the component belongs in such a one."""


def own(objects: list[dict]) -> dict[str, dict]:
    """Return the component's objects by kind, of an overlay's."""
    return {one["kind"]: one for one in objects if one["metadata"]["name"].startswith("tensorboard")}


@pytest.mark.parametrize("overlay", OWN_IMAGES)
def test_an_instances_tensorboard_is_nobody_elses(overlay: str, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", overlay, "tensorboard")
    instance = with_instance(tmp_path / "k8s" / "overlays" / "ann", overlay, tmp_path / "k8s")
    alone, of_ann = own(rendered(folder)), own(rendered(instance))
    assert alone.keys() == of_ann.keys() == {"Deployment", "Service", "NetworkPolicy"}
    image = alone["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert sum(image in json.dumps(one) for one in rendered(folder)) > 1, "the overlay's own name of the train image"
    for objects, suffix in ((alone, ""), (of_ann, "-ann")):
        labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == f"tensorboard{suffix}"
        assert labels["app.kubernetes.io/part-of"] == "vlmflow"
        selectors = [
            objects["Deployment"]["spec"]["selector"]["matchLabels"],
            objects["Service"]["spec"]["selector"],
            objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/name"] == f"tensorboard{suffix}"
        (claim,) = [
            volume["persistentVolumeClaim"]
            for volume in objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claim == {"claimName": f"outputs{suffix}", "readOnly": True}


def test_the_api_server_and_pod_security_accept_it(any_cluster: Kubectl, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", "local", "tensorboard")
    objects = own(rendered(folder))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tensorboard"}}
    pod["spec"] = objects["Deployment"]["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
    with any_cluster.having(a_namespace(f"{NAMESPACE}-checked", labels)):
        given = {"apiVersion": "v1", "kind": "List", "items": [*objects.values(), pod]}
        for one in given["items"]:
            one["metadata"]["namespace"] = f"{NAMESPACE}-checked"
        words = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"]
        assert any_cluster.kubectl(*words, input=json.dumps(given)).count("serverside-applied") == 4


@pytest.fixture(scope="module")
def pod(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a ready pod with the demo's run folders in its volume."""
    cluster.carry_in(images.project_image("train"))
    volumes = STATE / "volumes" / NAMESPACE
    shutil.rmtree(volumes, ignore_errors=True)
    for name in ("cache", "outputs", "controller-state"):
        (volumes / name).mkdir(parents=True)
    shutil.copytree(demo / "stores" / "runs", volumes / "outputs" / "runs")
    for place in [volumes / "outputs", *(volumes / "outputs").rglob("*")]:
        os.chown(place, PODS_USER, PODS_USER, follow_symlinks=False)
    overlay = with_component(tmp_path_factory.mktemp("k8s"), "local", "tensorboard")
    objects = in_namespace(cluster, NAMESPACE, volumes, overlay=overlay)
    without = [one for one in objects if (one["kind"], one["metadata"]["name"]) != ("Deployment", "controller")]
    with cluster.having(*(one for one in without if "namespace" not in one["metadata"])):
        cluster.apply([one for one in without if "namespace" in one["metadata"]])
        words = ("rollout", "status", "deployment/tensorboard", "--timeout=240s")
        cluster.kubectl(f"--namespace={NAMESPACE}", *words)
        (found,) = cluster.get("pods", namespace=NAMESPACE, labels="app.kubernetes.io/name=tensorboard")["items"]
        yield found["metadata"]["name"]


@contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """Forward a free port of this machine to the Service, as docs/kubernetes.md says; yield its address."""
    words = [binary("kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}"]
    process = subprocess.Popen(
        [*words, "port-forward", "service/tensorboard", ":6006"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        yield f"http://{process.stdout.readline().split()[2]}"
    finally:
        process.terminate()
        process.wait()


def test_it_shows_the_scalars_of_every_training(cluster: Cluster, pod: str) -> None:
    with forwarded(cluster) as address:
        give_up = time.monotonic() + 120
        while len(tags := httpx.get(f"{address}/data/plugin/scalars/tags", timeout=60).json()) < 2:
            assert time.monotonic() < give_up, tags
            time.sleep(1)
        assert sorted("/".join(name.split("/")[:2]) for name in tags) == [f"{RUN}/full", f"{RUN}/smoke"]
        full = next(name for name in tags if "/full/" in name)
        assert {"train/loss", "eval/loss"} <= tags[full].keys()
        points = httpx.get(f"{address}/data/plugin/scalars/scalars", params={"run": full, "tag": "train/loss"}).json()
        assert points[0][1] == 1


def test_its_pod_can_write_nothing_and_has_no_token(cluster: Cluster, pod: str) -> None:
    def in_pod(command: str) -> str:
        words = ("exec", pod, "--", "sh", "-c", f"{command} 2>&1 || true")
        return cluster.kubectl(f"--namespace={NAMESPACE}", *words)

    assert "Read-only file system" in in_pod("touch /outputs/runs/new")
    assert "Read-only file system" in in_pod("touch /home/vlmflow/new")
    assert "No such file" in in_pod("ls /var/run/secrets/kubernetes.io")
    assert in_pod("id -u").strip() == "1000"
