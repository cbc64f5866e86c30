"""Components of k8s/ that people add: TensorBoard and JupyterLab over the demo's volume, trackers as data."""

import json
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
from vlmflow.remote.kubernetes.templates import template_in
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


@pytest.fixture(scope="module")
def jupyter(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Component]:
    """JupyterLab, with the demo's targets in its volume."""

    def fill(outputs: Path) -> None:
        for name in ("data", "fitted", "lengths", "checkpoints", "verified"):
            shutil.copytree(demo / name, outputs / "targets" / name)

    with running(cluster, "jupyter", "jupyter", tmp_path_factory.mktemp("k8s"), fill) as component:
        yield component


@pytest.mark.slow
def test_only_its_token_opens_it(jupyter: Component) -> None:
    token = jupyter.in_pod("cat /tmp/token").strip()
    assert len(token) == 64
    assert token not in jupyter.cluster.kubectl(f"--namespace={jupyter.namespace}", "logs", jupyter.pod)
    with jupyter.forwarded(8888) as address:
        assert httpx.get(f"{address}/api/contents", timeout=60).status_code == 403
        assert httpx.post(f"{address}/api/kernels", timeout=60).status_code == 403
        known = {"headers": {"Authorization": f"token {token}"}, "timeout": 60}
        listed = httpx.get(f"{address}/api/contents", **known).raise_for_status().json()
        assert [one["name"] for one in listed["content"]] == ["look.ipynb"]


@pytest.mark.slow
def test_its_notebook_shows_the_results_on_the_volume(jupyter: Component) -> None:
    said = jupyter.in_pod(
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


@pytest.mark.slow
def test_jupyters_pod_can_write_nothing_and_has_no_token(jupyter: Component) -> None:
    assert "Read-only file system" in jupyter.in_pod("touch /outputs/targets/new")
    assert "Read-only file system" in jupyter.in_pod("touch /cache/new")
    assert "Read-only file system" in jupyter.in_pod("touch /opt/vlmflow/notebooks/new")
    assert "No such file" in jupyter.in_pod("ls /var/run/secrets/kubernetes.io")
    assert jupyter.in_pod("id -u").strip() == "1000"


OUTSIDE = "93.184.216.34"
"""An address outside the cluster."""


@pytest.mark.parametrize("overlay", OWN_IMAGES)
def test_only_its_pods_have_keys_and_reach_trackers(overlay: str, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", overlay, "trackers")
    instance = with_instance(tmp_path / "k8s" / "overlays" / "ann", overlay, tmp_path / "k8s")
    for objects, suffix in ((rendered(folder), ""), (rendered(instance), "-ann")):
        templates = {one["metadata"]["name"]: template_in(one) for one in objects if one["kind"] == "CronJob"}
        assert set(templates) == {
            f"{name}{suffix}" for name in ("answer", "default", "fetch", "gpu", "train", "search", "track")
        }
        with_keys = [name for name, one in templates.items() if f'"trackers{suffix}"' in json.dumps(one)]
        assert with_keys == [f"track{suffix}"]
        track = templates[f"track{suffix}"]["template"]
        assert "HF_TOKEN" not in json.dumps(track)
        secrets = [
            each["valueFrom"]["secretKeyRef"] for each in track["spec"]["containers"][0]["env"] if "valueFrom" in each
        ]
        assert all(secret["optional"] and secret["name"] == f"trackers{suffix}" for secret in secrets)
        assert len(secrets) == 4
        assert track["spec"]["containers"][0]["image"].rpartition("/")[2].startswith(("track:", "vlmflow-track:"))
        policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
        labels = track["metadata"]["labels"]
        server = {"vlmflow/tracker": "true"} | ({"app.kubernetes.io/instance": "ann"} if suffix else {})
        assert allowed(policies, labels, server, 5000)
        assert not allowed(policies, labels, {"app": "other"}, 5000)
        assert allowed(policies, labels, OUTSIDE, 443)
        if not overlay.startswith("s3"):  # there every pod reaches the storage
            assert not allowed(policies, templates[f"default{suffix}"]["template"]["metadata"]["labels"], OUTSIDE, 443)


def test_the_api_server_and_pod_security_accept_the_trackers_component(any_cluster: Kubectl, tmp_path: Path) -> None:
    objects = rendered(with_component(tmp_path / "k8s", "local", "trackers"))
    own = [one for one in objects if one["metadata"]["name"] in ("track", "track-reaches-trackers")]
    template = next(template_in(one) for one in own if one["kind"] == "CronJob")["template"]
    assert accepted(any_cluster, "track", own, template) == 3
