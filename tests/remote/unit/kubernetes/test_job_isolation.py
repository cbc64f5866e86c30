"""Jobs' pods and the controller in the files of k8s/; for overlays see tests/remote/cluster/test_objects.py."""

import yaml

from vlmflow.remote.kubernetes.objects import STATE_CLAIM
from vlmflow.remote.kubernetes.templates import template_in
from workflow_runs import ROOT

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
