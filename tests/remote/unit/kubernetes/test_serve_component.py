"""The component that serves a run's weights on a cluster, as data; tests/remote/cluster/test_serve.py runs it."""

import yaml

from cluster.policies import allowed
from vlmflow.core.child_programs import ANSWER_KEY
from vlmflow.serving.server import KEYS, NO_DOMAIN
from workflow_runs import ROOT

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
    assert MAIN["args"][:3] == ["python", "/opt/vlmflow/guarded.py", "/models/$(RUN)"]
    assert "\nCOPY scripts/vlmflow/serving/guarded.py /opt/vlmflow/\n" in (ROOT / "Dockerfile").read_text()
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
