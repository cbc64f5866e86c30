"""The component for trackers, as data: only its pods have the trackers' keys and a way out."""

import json
from pathlib import Path

import pytest

from cluster.component import accepted
from cluster.deployment import K8S, OVERLAYS, rendered, with_component, with_instance
from cluster.kubectl import Kubectl
from cluster.policies import allowed
from vlmflow.remote.kubernetes.templates import template_in

OWN_IMAGES = [name for name in OVERLAYS if "\nimages:" in (K8S / f"overlays/{name}/kustomization.yaml").read_text()]
"""The overlays that name the images; the component belongs in such a one."""

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


def test_the_api_server_and_pod_security_accept_it(any_cluster: Kubectl, tmp_path: Path) -> None:
    objects = rendered(with_component(tmp_path / "k8s", "local", "trackers"))
    own = [one for one in objects if one["metadata"]["name"] in ("track", "track-reaches-trackers")]
    template = next(template_in(one) for one in own if one["kind"] == "CronJob")["template"]
    assert accepted(any_cluster, "track", own, template) == 3
