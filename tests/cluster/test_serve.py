"""A finished run's weights served on the cluster: on the CPU, asked about a picture."""

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
from cluster.deployment import K8S, OVERLAYS, PODS_USER, in_namespace, rendered, with_component, with_instance
from cluster.kubectl import Kubectl, a_namespace
from cluster.paths import STATE
from vlmflow.pictures.size_limits import FEWEST_TOKENS
from vlmflow.serving.asked import asked_in_val
from vlmflow.serving.client import Client, picture_part
from vlmflow.serving.dialogue import messages_of
from workflow_runs import RUN

NAMESPACE = "vlmflow-serve"
OWN_IMAGES = [name for name in OVERLAYS if "\nimages:" in (K8S / f"overlays/{name}/kustomization.yaml").read_text()]
"""The overlays that name the images; the component belongs in such a one."""


def own(objects: list[dict]) -> dict[str, dict]:
    """Return the component's objects by kind, of an overlay's."""
    return {one["kind"]: one for one in objects if one["metadata"]["name"].startswith("serve")}


@pytest.mark.parametrize("overlay", OWN_IMAGES)
def test_an_instances_server_is_nobody_elses(overlay: str, tmp_path: Path) -> None:
    folder = with_component(tmp_path / "k8s", overlay, "serve")
    instance = with_instance(tmp_path / "k8s" / "overlays" / "ann", overlay, tmp_path / "k8s")
    alone, of_ann = own(rendered(folder)), own(rendered(instance))
    assert alone.keys() == of_ann.keys() == {"Deployment", "Service", "NetworkPolicy"}
    image = alone["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert sum(image in json.dumps(one) for one in rendered(folder)) > 1, "the overlay's own name of the train image"
    for objects, suffix in ((alone, ""), (of_ann, "-ann")):
        labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
        selectors = [
            objects["Deployment"]["spec"]["selector"]["matchLabels"],
            objects["Service"]["spec"]["selector"],
            objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/name"] == f"serve{suffix}"
        assert f'"claimName": "outputs{suffix}"' in json.dumps(objects["Deployment"])
    asking = of_ann["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert asking == {"vlmflow/asks-serve": "yes", "app.kubernetes.io/instance": "ann"}


@pytest.mark.parametrize("components", [["serve"], ["serve", "serve-vllm"]])
def test_the_api_server_and_pod_security_accept_it(any_cluster: Kubectl, tmp_path: Path, components: list[str]) -> None:
    folder = with_component(tmp_path / "k8s", "local", *components)
    objects = own(rendered(folder))
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "serve"}}
    pod["spec"] = objects["Deployment"]["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
    with any_cluster.having(a_namespace(f"{NAMESPACE}-checked", labels)):
        given = {"apiVersion": "v1", "kind": "List", "items": [*objects.values(), pod]}
        for one in given["items"]:
            one["metadata"]["namespace"] = f"{NAMESPACE}-checked"
        words = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"]
        assert any_cluster.kubectl(*words, input=json.dumps(given)).count("serverside-applied") == 4


@pytest.fixture(scope="module")
def pod(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a ready pod with the demo's weights in its volume."""
    cluster.carry_in(images.project_image("train"))
    volumes = STATE / "volumes" / NAMESPACE
    shutil.rmtree(volumes, ignore_errors=True)
    for name in ("cache", "outputs/targets", "controller-state"):
        (volumes / name).mkdir(parents=True)
    shutil.copytree(demo / "merged", volumes / "outputs" / "targets" / "merged")
    for place in [volumes / "outputs", *(volumes / "outputs").rglob("*")]:
        os.chown(place, PODS_USER, PODS_USER, follow_symlinks=False)
    overlay = with_component(tmp_path_factory.mktemp("k8s"), "local", "serve")
    objects = in_namespace(cluster, NAMESPACE, volumes, overlay=overlay)
    without = [one for one in objects if (one["kind"], one["metadata"]["name"]) != ("Deployment", "controller")]
    with cluster.having(*(one for one in without if "namespace" not in one["metadata"])):
        cluster.apply([one for one in without if "namespace" in one["metadata"]])
        words = ("rollout", "status", "deployment/serve", "--timeout=240s")
        cluster.kubectl(f"--namespace={NAMESPACE}", *words)
        (found,) = cluster.get("pods", namespace=NAMESPACE, labels="app.kubernetes.io/name=serve")["items"]
        yield found["metadata"]["name"]


@contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """Forward a free port of this machine to the Service, as docs/use.md says; yield the API's address."""
    words = [binary("kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}"]
    process = subprocess.Popen([*words, "port-forward", "service/serve", ":8000"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield f"http://{process.stdout.readline().split()[2]}/v1"
    finally:
        process.terminate()
        process.wait()


def prompt_tokens(url: str, messages: list[dict]) -> int:
    body = {"model": f"/models/{RUN}", "messages": messages, "max_tokens": 1}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60, trust_env=False)
    return reply.raise_for_status().json()["usage"]["prompt_tokens"]


def test_it_answers_about_a_picture(cluster: Cluster, pod: str, demo: Path) -> None:
    asked = asked_in_val(demo / "fitted" / RUN, demo / "stores" / "pictures")
    messages = messages_of(asked.turns, [picture_part(file) for file in asked.pictures])
    with forwarded(cluster) as url, Client(url, f"/models/{RUN}") as client:
        answer = client.answer(messages, 12)
        assert answer.text.strip()
        assert client.answer(messages, 12) == answer, "greedy"
        asked_again = [messages, [{"role": "user", "content": messages[0]["content"][-1]["text"]}]]
        with_picture, without = (prompt_tokens(url, each) for each in asked_again)
    assert with_picture >= without + FEWEST_TOKENS, "the model saw the picture"


def test_its_pod_can_write_nothing_and_has_no_token(cluster: Cluster, pod: str) -> None:
    def in_pod(command: str) -> str:
        words = ("exec", pod, "--", "sh", "-c", f"{command} 2>&1 || true")
        return cluster.kubectl(f"--namespace={NAMESPACE}", *words)

    assert "Read-only file system" in in_pod("touch /models/new")
    assert "Read-only file system" in in_pod("touch /home/vlmflow/new")
    assert "No such file" in in_pod("ls /var/run/secrets/kubernetes.io")
    assert in_pod("ls /models").split() == [RUN]
    assert in_pod("id -u").strip() == "1000"
