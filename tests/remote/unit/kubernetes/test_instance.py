"""Names, labels and selectors of a vlmflow that shares its namespace with others."""

import json

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import controller, copying
from vlmflow.remote.cluster.pods import pod_templates
from vlmflow.remote.kubernetes.job_shape import Owner


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_INSTANCE", "ann")


def test_without_an_instance_names_are_those_of_k8s_and_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("", None):
        monkeypatch.setenv("VLMFLOW_INSTANCE", given) if given is not None else monkeypatch.delenv("VLMFLOW_INSTANCE")
        assert copying.named("controller") == copying.short("controller") == "controller"
        assert copying.selector() == "app.kubernetes.io/part-of=vlmflow,!app.kubernetes.io/instance"
        assert copying.labels() == {}


def test_an_instance_has_a_suffix_and_a_label_everywhere(ann: None) -> None:
    assert copying.named("hf-token") == "hf-token-ann"
    assert copying.selector() == "app.kubernetes.io/part-of=vlmflow,app.kubernetes.io/instance=ann"
    assert Owner("call", "workdir", "targets").labels["app.kubernetes.io/instance"] == "ann"
    metadata = json.loads(controller.secret("hf_abc"))["metadata"]
    assert metadata["name"] == "hf-token-ann"
    assert metadata["labels"]["app.kubernetes.io/instance"] == "ann"


def test_rules_ask_for_templates_by_their_short_names(ann: None) -> None:
    found = {"podtemplates": [{"metadata": {"name": "gpu-ann"}}, {"metadata": {"name": "big"}}]}
    templates = pod_templates(lambda kind: found.get(kind, [])).templates
    assert [template["metadata"]["name"] for template in templates] == ["gpu", "big"]


@pytest.mark.parametrize("name", ["Ann", "-ann", "ann-", "a,b", "ann=x", "a" * 31, "ann\n"])
def test_invalid_names_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLMFLOW_INSTANCE", name)
    with pytest.raises(VlmflowError, match="VLMFLOW_INSTANCE is"):
        copying.selector()
