"""A finished run's weights served on the cluster: on the CPU, asked about a picture."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.cluster import Cluster
from cluster.component import Component, accepted, running
from cluster.deployment import K8S, OVERLAYS, rendered, with_component, with_instance
from cluster.kubectl import Kubectl
from vlmflow.core.child_programs import ANSWER_KEY
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import FEWEST_TOKENS
from vlmflow.rows.chat import messages_of
from vlmflow.serving.asked import asked_in_val
from vlmflow.serving.client import Client, picture_part
from workflow_runs import RUN

KEY = "open-sesame"
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "answer-key"}, "stringData": {ANSWER_KEY: KEY}}

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
        env = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
        secrets = [
            each["valueFrom"]["secretKeyRef"]["name"] for each in env if "secretKeyRef" in each.get("valueFrom", {})
        ]
        assert secrets == [f"answer-key{suffix}"] * 2
    asking = of_ann["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert asking == {"vlmflow/asks-serve": "yes", "app.kubernetes.io/instance": "ann"}


@pytest.mark.parametrize("components", [["serve"], ["serve", "serve-vllm"]])
def test_the_api_server_and_pod_security_accept_it(any_cluster: Kubectl, tmp_path: Path, components: list[str]) -> None:
    folder = with_component(tmp_path / "k8s", "local", *components)
    objects = own(rendered(folder))
    assert accepted(any_cluster, "serve", objects.values(), objects["Deployment"]["spec"]["template"]) == 4


@pytest.fixture(scope="module")
def serve(cluster: Cluster, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Component]:
    """The server of the demo's weights, which are in its volume."""

    def fill(outputs: Path) -> None:
        shutil.copytree(demo / "merged", outputs / "targets" / "merged")

    with running(cluster, "serve", "train", tmp_path_factory.mktemp("k8s"), fill, [SECRET]) as component:
        yield component


def prompt_tokens(url: str, messages: list[dict]) -> int:
    body = {"model": f"/models/{RUN}", "messages": messages, "max_tokens": 1}
    key = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{url}/chat/completions", json=body, headers=key, timeout=60, trust_env=False)
    return reply.raise_for_status().json()["usage"]["prompt_tokens"]


def test_it_answers_about_a_picture(serve: Component, demo: Path) -> None:
    asked = asked_in_val(demo / "fitted" / RUN, demo / "stores" / "pictures")
    messages = messages_of(asked.turns, [picture_part(file) for file in asked.pictures])
    with serve.forwarded(8000) as address, Client(url := f"{address}/v1", f"/models/{RUN}", KEY) as client:
        answer = client.answer(messages, 12)
        assert answer.text.strip()
        assert client.answer(messages, 12) == answer, "greedy"
        asked_again = [messages, [{"role": "user", "content": messages[0]["content"][-1]["text"]}]]
        with_picture, without = (prompt_tokens(url, each) for each in asked_again)
        with Client(url, f"/models/{RUN}") as stranger, pytest.raises(VlmflowError, match="HTTP 401"):
            stranger.answer(messages, 1)
    assert with_picture >= without + FEWEST_TOKENS, "the model saw the picture"


def test_its_pod_can_write_nothing_and_has_no_token(serve: Component) -> None:
    assert "Read-only file system" in serve.in_pod("touch /models/new")
    assert "Read-only file system" in serve.in_pod("touch /home/vlmflow/new")
    assert "No such file" in serve.in_pod("ls /var/run/secrets/kubernetes.io")
    assert serve.in_pod("ls /models").split() == [RUN]
    assert serve.in_pod("id -u").strip() == "1000"
