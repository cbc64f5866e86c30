"""An API server and its Pod Security admission check every object of k8s/."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.deployment import K8S, OVERLAYS, rendered, with_instance
from cluster.kubectl import Kubectl, a_namespace
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.kubernetes.templates import refuse_reach, template_in
from workflow_runs import VERSION

WORKLOADS = {"Deployment", "CronJob"}
NAMESPACE = "vlmflow-objects"


@pytest.fixture(scope="module")
def namespace(any_cluster: Kubectl) -> Iterator[str]:
    """A namespace with the labels of k8s/base."""
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    with any_cluster.having(a_namespace(NAMESPACE, labels)):
        yield NAMESPACE


def pod_of(workload: dict) -> dict:
    """Return the pod of a workload as a separate object."""
    template = (template_in(workload) if workload["kind"] == "CronJob" else workload["spec"])["template"]
    name = f"{workload['kind']}-{workload['metadata']['name']}".lower()
    spec = template["spec"] | {"restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def dry_run(cluster: Kubectl, objects: list[dict], namespace: str) -> str:
    """Make the API server check objects as if it created them; return its answer."""
    whole = {"Namespace", "ClusterRole", "ClusterRoleBinding", "PersistentVolume"}
    for one in objects:
        if one["kind"] not in whole:
            one["metadata"]["namespace"] = namespace
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    words = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--filename=-"]
    return cluster.kubectl(*words, input=given)


@pytest.mark.parametrize("overlay", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_the_api_server_accepts_every_object(any_cluster: Kubectl, namespace: str, overlay: str) -> None:
    objects = rendered(K8S / overlay)
    for one in objects:
        if "namespace" not in one["metadata"]:
            one["metadata"]["name"] += "-checked"  # one of that name may exist
    said = dry_run(any_cluster, objects, namespace)
    assert said.count("serverside-applied") == len(objects)


def test_an_object_with_a_key_that_is_none_is_not_taken(any_cluster: Kubectl, namespace: str) -> None:
    template = next(one for one in rendered(K8S / "templates") if one["metadata"]["name"] == "gpu")
    template["spec"]["jobTemplate"]["spec"]["template"]["spec"]["tolerance"] = []
    with pytest.raises(VlmflowError, match="tolerance"):
        dry_run(any_cluster, [template], namespace)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_security_restricted_takes_every_pod(any_cluster: Kubectl, namespace: str, overlay: str) -> None:
    account = {"serviceAccountName": "default"}
    for workload in rendered(K8S / "overlays" / overlay):
        if workload["kind"] in WORKLOADS:
            pod = pod_of(workload)
            pod["spec"] |= account
            dry_run(any_cluster, [pod], namespace)


@pytest.mark.parametrize(
    ("security", "words"),
    [
        ({"privileged": True, "allowPrivilegeEscalation": True}, "privileged"),
        ({"runAsUser": 0}, "runAsUser=0"),
        ({"capabilities": {}}, "capabilities"),
    ],
)
def test_pod_security_rejects_a_pod_that_could_do_more(
    any_cluster: Kubectl, namespace: str, security: dict, words: str
) -> None:
    template = next(one for one in rendered(K8S / "templates") if one["metadata"]["name"] == "default")
    pod = pod_of(template)
    pod["spec"] |= {"serviceAccountName": "default"}
    pod["spec"]["containers"][0]["securityContext"] |= security
    with pytest.raises(VlmflowError, match=f"(?s)violates PodSecurity.*{words}"):
        any_cluster.kubectl("create", f"--namespace={namespace}", "--filename=-", input=json.dumps(pod))


def test_a_shared_clusters_overlay_makes_what_a_namespaces_administrator_may(any_cluster: Kubectl) -> None:
    """Kubernetes' ClusterRole `admin`; test_doctor.py applies such objects with it."""
    may = granted(any_cluster.get("clusterrole", "admin"))
    objects = rendered(K8S / "overlays/nautilus")
    kinds = {one["kind"].lower() for one in objects}
    plurals = {kind.removesuffix("y") + ("ies" if kind.endswith("y") else "s") for kind in kinds}
    assert {("create", plural) for plural in plurals} - may == set()
    (role,) = [one for one in objects if one["kind"] == "Role"]
    assert granted(role) - may == set()


def granted(role: dict) -> set[tuple[str, str]]:
    """Return what a role grants, as (verb, resource)."""
    return {(verb, name) for rule in role["rules"] for verb in rule["verbs"] for name in rule.get("resources", [])}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_complete(overlay: str) -> None:
    objects = rendered(K8S / "overlays" / overlay)
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert {("CronJob", name) for name in ("answer", "default", "fetch", "train", "gpu")} <= names
    claims = {"cache", "outputs"} | (set() if overlay.startswith("s3") else {"controller-state"})
    assert {name for kind, name in names if kind == "PersistentVolumeClaim"} == claims
    assert ("Secret", "hf-token") not in names
    assert all(one["metadata"]["labels"]["app.kubernetes.io/part-of"] == "vlmflow" for one in objects)
    own = {one["metadata"]["namespace"] for one in objects if "namespace" in one["metadata"]}
    assert len(own) == 1
    assert {subject["namespace"] for one in objects for subject in one.get("subjects", [])} <= own
    for workload in objects:
        if workload["kind"] in WORKLOADS:
            spec = pod_of(workload)["spec"]
            mounts = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
            assert {"/cache", "/outputs"} <= mounts
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                assert container["image"].rpartition(":")[2] == VERSION
            token = any("HF_TOKEN" in str(container.get("env")) for container in spec["containers"])
            assert token == (workload["metadata"]["name"] == "fetch")
            controller = workload["kind"] == "Deployment"
            assert spec["automountServiceAccountToken"] == controller


def claims_of(spec: dict) -> dict[str, str]:
    """Return the claims of a pod, by the path at which its containers have them."""
    volumes = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in spec["volumes"]}
    mounts = [mount for container in spec["containers"] for mount in container["volumeMounts"]]
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts if volumes[mount["name"]]}


@pytest.mark.parametrize(
    ("overlay", "component"),
    [
        *((overlay, "") for overlay in OVERLAYS),
        ("local", "cache-on-one-node"),
        ("s3", "cache-on-one-node"),
    ],
)
def test_no_job_writes_what_a_pod_with_a_token_executes(overlay: str, component: str, tmp_path: Path) -> None:
    """In every overlay, and with the component that changes volumes."""
    kustomization: dict = {"resources": [os.path.relpath(K8S / "overlays" / overlay, tmp_path)]}
    if component:
        kustomization["components"] = [os.path.relpath(K8S / "components" / component, tmp_path)]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    workloads = [one for one in rendered(tmp_path) if one["kind"] in WORKLOADS]
    pods = {one["metadata"]["name"]: pod_of(one)["spec"] for one in workloads}
    controller = pods.pop("controller", None)
    assert set(pods) == {"answer", "default", "fetch", "train", "gpu", "search"}
    of_jobs = set()
    for name, spec in pods.items():
        refuse_reach(name, spec, "")
        kinds = {kind for volume in spec["volumes"] for kind in volume} - {"name"}
        # The projected token is for the storage; refuse_reach refuses one for the API server.
        assert kinds - {"projected"} == {"persistentVolumeClaim", "emptyDir"}
        assert "projected" not in kinds or overlay == "s3-identity"
        of_jobs |= set(claims_of(spec).values())
    assert of_jobs == {"cache", "outputs"}
    assert (controller is None) == (overlay.startswith("s3"))
    if controller:
        main = controller["containers"][0]
        executed = [main["workingDir"], *(word for word in main["args"] if word.startswith("/"))]
        shared = [path for path, claim in claims_of(controller).items() if claim in of_jobs]
        assert shared == ["/cache", "/outputs"]
        assert not [path for path in executed if path.startswith(tuple(shared))]
        assert claims_of(controller)["/controller"] == "controller-state"


def folders_of(objects: list[dict]) -> set[str]:
    """Return the node folders of the volumes."""
    return {one["spec"]["hostPath"]["path"] for one in objects if one["kind"] == "PersistentVolume"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_instance_names_nothing_of_anothers(overlay: str, tmp_path: Path) -> None:
    objects = rendered(with_instance(tmp_path / "ann", overlay))
    others = rendered(K8S / "overlays" / overlay)
    assert {one["metadata"]["name"] for one in objects} & {one["metadata"]["name"] for one in others} == set()
    assert folders_of(objects) & folders_of(others) == set()
    assert len(folders_of(objects)) == len(folders_of(others))
    assert {one["kind"] for one in objects} & {"Namespace", "ResourceQuota", "LimitRange"} == set()
    assert all(one["metadata"]["labels"]["app.kubernetes.io/instance"] == "ann" for one in objects)
    for one in objects:
        if one["kind"] in WORKLOADS:
            spec = pod_of(one)["spec"]
            assert all(claim.endswith("-ann") for claim in claims_of(spec).values())
            assert spec["serviceAccountName"].endswith("-ann")
            env = spec["containers"][0]["env"] if one["kind"] == "CronJob" else []
            secrets = [each["valueFrom"]["secretKeyRef"]["name"] for each in env if "secretKeyRef" in str(each)]
            assert secrets == {"fetch-ann": ["hf-token-ann"], "answer-ann": ["answer-key-ann"]}.get(
                one["metadata"]["name"], []
            )
    selectors = [one["spec"]["podSelector"]["matchLabels"] for one in objects if one["kind"] == "NetworkPolicy"]
    assert all(labels["app.kubernetes.io/instance"] == "ann" for labels in selectors)


def test_on_a_shared_cluster_limits_are_requests() -> None:
    """Nautilus refuses pods whose limits exceed their requests by more than a fifth; jobs have equal ones."""
    (controller,) = [one for one in rendered(K8S / "overlays/nautilus") if one["kind"] == "Deployment"]
    spec = controller["spec"]["template"]["spec"]
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory", "ephemeral-storage"}
