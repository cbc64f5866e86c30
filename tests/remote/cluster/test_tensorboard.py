"""TensorBoard on the cluster, with the demo's trainings on its volume; and the objects of it and of Jupyter."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.cluster import Cluster
from cluster.component import Component, accepted, running
from cluster.deployment import K8S, OVERLAYS, rendered, with_component, with_instance
from cluster.kubectl import Kubectl
from cluster.policies import allowed
from workflow_runs import RUN

OWN_IMAGES = [name for name in OVERLAYS if "\nimages:" in (K8S / f"overlays/{name}/kustomization.yaml").read_text()]
"""The overlays that name the images; the component belongs in such a one."""


COMPONENTS = {"tensorboard": {"outputs"}, "jupyter": {"cache", "outputs"}}
"""The components for people who look at results, with the claims that each mounts."""


def own(objects: list[dict], component: str) -> dict[str, dict]:
    """Return a component's objects by kind, of an overlay's."""
    return {one["kind"]: one for one in objects if one["metadata"]["name"].startswith(component)}


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("overlay", OWN_IMAGES)
def test_an_instances_component_is_nobody_elses(component: str, overlay: str, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", overlay, component)
    instance = with_instance(tmp_path / "k8s" / "overlays" / "ann", overlay, tmp_path / "k8s")
    alone, of_ann = own(rendered(folder), component), own(rendered(instance), component)
    assert alone.keys() == of_ann.keys() == {"Deployment", "Service", "NetworkPolicy"}
    image = alone["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"]
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["images"]
    assert image in {f"{one.get('newName', one['name'])}:{one['newTag']}" for one in named}, "the overlay's own name"
    for objects, suffix in ((alone, ""), (of_ann, "-ann")):
        labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == f"{component}{suffix}"
        assert labels["app.kubernetes.io/part-of"] == "vlmflow"
        selectors = [
            objects["Deployment"]["spec"]["selector"]["matchLabels"],
            objects["Service"]["spec"]["selector"],
            objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/name"] == f"{component}{suffix}"
        pod = objects["Deployment"]["spec"]["template"]["spec"]
        claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert {one["claimName"] for one in claims} == {f"{name}{suffix}" for name in COMPONENTS[component]}
        assert all(one["readOnly"] for one in claims)
        mounts = pod["containers"][0]["volumeMounts"]
        assert {one["name"] for one in mounts if not one.get("readOnly")} == {"tmp"}


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("overlay", OWN_IMAGES)
def test_no_pod_reaches_a_component_and_it_reaches_nothing(component: str, overlay: str, tmp_path: Path) -> None:
    objects = rendered(with_component(tmp_path / "k8s", overlay, component))
    network = [one for one in objects if one["kind"] == "NetworkPolicy"]
    labels = own(objects, component)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    port = own(objects, component)["Service"]["spec"]["ports"][0]["port"]
    others = [
        {"app.kubernetes.io/part-of": "vlmflow"},
        {"app.kubernetes.io/name": "controller", "app.kubernetes.io/part-of": "vlmflow"},
        {"app.kubernetes.io/part-of": "vlmflow", "vlmflow/group": "a"},
        {"somebody": "else"},
    ]
    assert not [other for other in others if allowed(network, other, labels, port)]
    outside = ("10.0.0.1", "9.9.9.9")
    assert not [end for end in (*others, *outside) for to in (53, 443) if allowed(network, labels, end, to)]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_api_server_and_pod_security_accept_it(any_cluster: Kubectl, component: str, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", "local", component)
    objects = own(rendered(folder), component)
    assert accepted(any_cluster, component, objects.values(), objects["Deployment"]["spec"]["template"]) == 4


@pytest.fixture(scope="module")
def tensorboard(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Component]:
    """TensorBoard, with the demo's run folders in its volume."""

    def fill(outputs: Path) -> None:
        shutil.copytree(demo / "stores" / "runs", outputs / "runs")

    with running(cluster, "tensorboard", "train", tmp_path_factory.mktemp("k8s"), fill) as component:
        yield component


def test_it_shows_the_scalars_of_every_training(tensorboard: Component) -> None:
    with tensorboard.forwarded(6006) as address:
        give_up = time.monotonic() + 120
        while len(tags := httpx.get(f"{address}/data/plugin/scalars/tags", timeout=60).json()) < 2:
            assert time.monotonic() < give_up, tags
            time.sleep(1)
        assert sorted("/".join(name.split("/")[:2]) for name in tags) == [f"{RUN}/full", f"{RUN}/smoke"]
        full = next(name for name in tags if "/full/" in name)
        assert {"train/loss", "eval/loss"} <= tags[full].keys()
        asked = {"run": full, "tag": "train/loss"}
        points = httpx.get(f"{address}/data/plugin/scalars/scalars", params=asked, timeout=60).json()
        assert points[0][1] == 1


def test_its_pod_can_write_nothing_and_has_no_token(tensorboard: Component) -> None:
    assert "Read-only file system" in tensorboard.in_pod("touch /outputs/runs/new")
    assert "Read-only file system" in tensorboard.in_pod("touch /home/vlmflow/new")
    assert "No such file" in tensorboard.in_pod("ls /var/run/secrets/kubernetes.io")
    assert tensorboard.in_pod("id -u").strip() == "1000"
