"""Names, labels and selectors of a vlmflow that shares its namespace with others."""

import json

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import controller, kubectl
from vlmflow.remote.kubernetes.job_shape import Owner


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_INSTANCE", "ann")


def test_without_an_instance_names_are_those_of_k8s_and_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("", None):
        monkeypatch.setenv("VLMFLOW_INSTANCE", given) if given is not None else monkeypatch.delenv("VLMFLOW_INSTANCE")
        assert kubectl.own_name("controller") == kubectl.short_name("controller") == "controller"
        assert kubectl.own_selector() == "app.kubernetes.io/part-of=vlmflow,!app.kubernetes.io/instance"
        assert kubectl.own_labels() == {}


def test_an_instance_has_a_suffix_and_a_label_everywhere(ann: None) -> None:
    assert kubectl.own_name("hf-token") == "hf-token-ann"
    assert kubectl.own_selector() == "app.kubernetes.io/part-of=vlmflow,app.kubernetes.io/instance=ann"
    assert Owner("call", "workdir", "targets").labels["app.kubernetes.io/instance"] == "ann"
    metadata = json.loads(controller.secret("hf_abc"))["metadata"]
    assert metadata["name"] == "hf-token-ann"
    assert metadata["labels"]["app.kubernetes.io/instance"] == "ann"


@pytest.mark.parametrize("name", ["Ann", "-ann", "ann-", "a,b", "ann=x", "a" * 31, "ann\n"])
def test_invalid_names_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLMFLOW_INSTANCE", name)
    with pytest.raises(VlmflowError, match="VLMFLOW_INSTANCE is"):
        kubectl.own_selector()
