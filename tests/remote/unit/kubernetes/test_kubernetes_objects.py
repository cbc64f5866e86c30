"""Objects of a vlmflow as data: names shared with no other one, jobs' pods, and the component that serves."""

import json

import pytest
import yaml

from cluster.policies import allowed
from vlmflow.core.child_programs import ANSWER_KEY
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import controller, kubectl
from vlmflow.remote.kubernetes.job_shape import Owner
from vlmflow.remote.kubernetes.objects import STATE_CLAIM
from vlmflow.remote.kubernetes.templates import template_in
from vlmflow.serving.server import KEYS, NO_DOMAIN
from workflow_runs import ROOT


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


K8S = ROOT / "k8s"
TMP = "/tmp"  # noqa: S108 - in a container


def test_only_the_controllers_file_names_its_claim() -> None:
    """The overlays set its volume, or leave the claim out."""
    naming = {str(file.relative_to(K8S)) for file in K8S.rglob("*.yaml") if STATE_CLAIM in file.read_text()}
    own = {"base/claims.yaml", "base/controller.yaml"}
    given = {"overlays/local/kustomization.yaml", "overlays/local/volumes.yaml", "overlays/s3/kustomization.yaml"}
    assert naming == own | given | {"components/instance/kustomization.yaml"}


def test_the_controllers_code_is_on_its_claim_or_in_its_config_map() -> None:
    spec = yaml.safe_load((K8S / "base/controller.yaml").read_text())["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in spec["containers"][0]["volumeMounts"]}
    assert spec["containers"][0]["workingDir"] == "/controller/vlmflow"
    assert mounts["/controller"]["persistentVolumeClaim"]["claimName"] == STATE_CLAIM
    assert spec["containers"][0]["args"] == ["python", "/opt/controller/controller.py", "serve"]
    assert "configMap" in mounts["/opt/controller"]


def test_nothing_is_written_into_an_images_files() -> None:
    """A container's own files go to an emptyDir: HOME with the caches, and temporary files."""
    files = [K8S / "base/controller.yaml", *(K8S / "templates").glob("[!k]*.yaml")]
    assert len(files) == 7
    for file in files:
        found = yaml.safe_load(file.read_text())
        spec = (template_in(found) if found["kind"] == "CronJob" else found["spec"])["template"]["spec"]
        empty = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        main = spec["containers"][0]
        writable = {mount["mountPath"] for mount in main["volumeMounts"] if mount["name"] in empty}
        variables = {each["name"]: each.get("value") for each in main["env"]}
        assert {TMP, variables["HOME"], variables.get("TMPDIR", TMP)} <= writable, file
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, file


def test_jobs_mount_the_two_shared_claims_and_no_more() -> None:
    for file in (K8S / "templates").glob("*.yaml"):
        if file.name != "kustomization.yaml":
            volumes = template_in(yaml.safe_load(file.read_text()))["template"]["spec"]["volumes"]
            kinds = {volume["name"]: sorted(volume.keys() - {"name"}) for volume in volumes}
            claims = [name for name, kind in kinds.items() if kind == ["persistentVolumeClaim"]]
            assert claims == ["cache", "outputs"], file
            assert {name: ["emptyDir"] for name in kinds.keys() - set(claims)}.items() <= kinds.items(), file


COMPONENTS = ROOT / "k8s" / "components"
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all((COMPONENTS / "serve" / "serve.yaml").read_text())}
POD = OBJECTS["Deployment"]["spec"]["template"]
(MAIN,) = POD["spec"]["containers"]


def test_its_pod_has_one_key_and_sees_only_merged_weights_read_only() -> None:
    spec = POD["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    hardened = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    assert MAIN["securityContext"] == hardened
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (claim,) = [volume["persistentVolumeClaim"] for volume in volumes.values() if "emptyDir" not in volume]
    assert claim == {"claimName": "outputs", "readOnly": True}
    (mount,) = [mount for mount in MAIN["volumeMounts"] if "emptyDir" not in volumes[mount["name"]]]
    assert mount == {"name": "outputs", "mountPath": "/models", "subPath": "targets/merged", "readOnly": True}
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in MAIN["env"] if "secretKeyRef" in str(one)}
    assert secrets == {key: {"name": "answer-key", "key": ANSWER_KEY} for key in KEYS}, (
        "not optional: no key, no server"
    )


def test_one_model_at_a_time_is_in_memory_and_is_asked_once_it_answers() -> None:
    assert OBJECTS["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert MAIN["args"][:3] == ["python", "/opt/vlmflow/vlmflow/serving/guarded.py", "/models/$(RUN)"]
    assert "\nCOPY scripts/vlmflow /opt/vlmflow/vlmflow\n" in (ROOT / "Dockerfile").read_text()
    own_name = [{"name": "Host", "value": "localhost"}]  # its address is no name of a server that looks at names
    for probe in ("startupProbe", "readinessProbe"):
        assert MAIN[probe]["httpGet"] == {"path": "/health", "port": "http", "httpHeaders": own_name}
    start = MAIN["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    service = OBJECTS["Service"]["spec"]
    assert service["type"] == "ClusterIP"
    assert service["selector"].items() <= POD["metadata"]["labels"].items()
    names = [word.removeprefix("--name=") for word in MAIN["args"] if word.startswith("--name=")]
    assert names[0] == "$(SERVICE)"
    assert names[1:] == [f"$(SERVICE).$(NAMESPACE){end}" for end in ("", ".svc", ".svc.cluster.local")]


def test_only_pods_with_the_label_reach_it_and_it_reaches_nothing() -> None:
    base = list(yaml.safe_load_all((ROOT / "k8s/base/network.yaml").read_text()))
    policies, server = [*base, OBJECTS["NetworkPolicy"]], POD["metadata"]["labels"]
    asking = {"vlmflow/asks-serve": "yes"}
    assert allowed(policies, asking, server, 8000)
    assert not allowed(policies, asking, server, 22)
    for other in ({}, {"vlmflow/asks-serve": "no"}, {"app.kubernetes.io/part-of": "vlmflow"}, "10.0.0.7"):
        assert not allowed(policies, other, server, 8000), other
    for target in (asking, "10.0.0.7", "8.8.8.8"):
        assert not allowed(policies, server, target, 443), target
    assert not allowed(policies, server, "10.96.0.10", 53, "UDP")


def test_the_variant_for_gpus_is_vllm_with_a_tag_and_its_own_probes() -> None:
    component = yaml.safe_load((COMPONENTS / "serve-vllm" / "kustomization.yaml").read_text())
    (patch,) = component["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": OBJECTS["Deployment"]["metadata"]["name"]}
    spec = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name, _, tag = container["image"].partition(":")
    assert (name, tag[0], container["name"]) == ("vllm/vllm-openai", "v", MAIN["name"])
    assert container["command"] == ["vllm", "serve"]
    assert not [word for word in container["args"] if "trust" in word or "api-key" in word or "local-media" in word]
    assert {f"--allowed-media-domains={NO_DOMAIN}", "--allowed-origins=[]"} < {*container["args"]}
    assert not {"startupProbe", "readinessProbe"} & container.keys(), "those of the component: no probe has the key"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"shm": "/dev/shm"}  # noqa: S108
    assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"
