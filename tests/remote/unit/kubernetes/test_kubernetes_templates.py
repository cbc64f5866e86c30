"""Pod templates, their merge into the executor's Jobs, and what is refused."""

import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forked_snakemake import called
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import label_value, shape
from vlmflow.remote.kubernetes.templates import check_files, choose, merge, read_template, read_templates, template_in
from workflow_runs import ROOT, VERSION, clone

FOLDER = ROOT / "k8s" / "templates"

PLUGINS_JOB = {
    "metadata": {"name": "snakejob-1", "labels": {"app": "snakemake"}},
    "spec": {
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "nodeSelector": {},
                "containers": [
                    {
                        "name": "snakemake",
                        "image": "plugins:1",
                        "command": ["/bin/sh"],
                        "args": ["-c", "python -m snakemake"],
                        "workingDir": "/workdir",
                        "env": [{"name": "A", "value": "plugin"}],
                        "volumeMounts": [
                            {"name": "workdir", "mountPath": "/workdir"},
                            {"name": "outputs", "mountPath": "/outputs"},
                        ],
                        "resources": {"requests": {"cpu": "950m", "memory": "1M", "nvidia.com/gpu": "4"}},
                    }
                ],
                "volumes": [{"name": "workdir", "emptyDir": {}}],
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Equal", "value": "present"}],
            }
        },
    },
}
OWNER = {"vlmflow/invocation": "abc"}


def shipped() -> list[dict]:
    files = (FOLDER / f"{name}.yaml" for name in ("default", "fetch", "gpu", "train", "answer"))
    return [template_in(yaml.safe_load(file.read_text())) for file in files]


def shaped(template: str = "train", **rule: object) -> dict:
    templates = read_templates(shipped(), "vlmflow")
    rule_job = RuleJob("train_model", {"run": "qwen3vl-fire"}, **rule)
    return shape(PLUGINS_JOB, templates[template], rule_job, OWNER, {"VLMFLOW_COMMIT": "v1"})


def with_volume(found: dict, **volume: object) -> None:
    found["template"]["spec"]["volumes"].append({"name": "more", **volume})


def pod_of(job: dict) -> dict:
    return job["spec"]["template"]["spec"]


def main_of(job: dict) -> dict:
    return pod_of(job)["containers"][0]


@pytest.mark.parametrize("trial", [{"run": "mine"}, {"search": "rates", "round": "0", "rung": "0", "slot": "1"}])
def test_a_training_on_several_nodes_knows_its_run_folders(trial: dict[str, str]) -> None:
    job = SimpleNamespace(
        rules=["x"],
        wildcards_dict=trial,
        threads=2,
        resources={"nodes": 2},
        params=SimpleNamespace(run_store="/outputs/stores/runs"),
        input=SimpleNamespace() if "run" in trial else SimpleNamespace(rows="/outputs/targets/fitted/mine"),
    )
    assert RuleJob.of(job).runs == "/outputs/stores/runs/mine"


def test_the_template_overrides_the_plugin_and_the_rule_overrides_the_template() -> None:
    job = shaped(threads=8, mem_mb=65_536, disk_mb=20_000, runtime=60)
    main = main_of(job)
    assert main["image"] == f"vlmflow/train:{VERSION}"
    assert main["command"] == ["/usr/bin/tini", "-g", "--", "/bin/sh"]
    assert main["args"] == ["-c", "trap : TERM; python -m snakemake"]
    declared = {"cpu": "8", "memory": "65536M", "ephemeral-storage": "20000M"}
    assert main["resources"] == {"requests": declared, "limits": declared}
    assert pod_of(job)["activeDeadlineSeconds"] == 3600 + 1800  # the rule's hour, plus time to pull the image
    assert "activeDeadlineSeconds" not in job["spec"]
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["ttlSecondsAfterFinished"] >= 24 * 3600
    assert {"name": "A", "value": "plugin"} in main["env"]
    assert {"name": "VLMFLOW_COMMIT", "value": "v1"} in main["env"]
    assert {"name": "VLMFLOW_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in main["env"]
    assert {mount["mountPath"] for mount in main["volumeMounts"]} >= {"/workdir", "/outputs", "/cache", "/dev/shm"}  # noqa: S108


def test_labels_say_rule_run_and_owner() -> None:
    job = shaped()
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert metadata["labels"]["vlmflow/rule"] == "train_model"
        assert metadata["labels"]["vlmflow/run"] == "qwen3vl-fire"
        assert metadata["labels"]["vlmflow/invocation"] == "abc"
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "vlmflow"
    assert job["metadata"]["name"] == "snakejob-1"


def test_gpu_resource_takes_the_clusters_name() -> None:
    objects = shipped()
    objects[2]["metadata"]["annotations"]["vlmflow/gpu-resource"] = "nvidia.com/a100"
    job = shape(PLUGINS_JOB, read_template(objects[2]), RuleJob("train_model", gpus=4), OWNER, {})
    for amounts in main_of(job)["resources"].values():
        assert amounts["nvidia.com/a100"] == "4"
        assert "nvidia.com/gpu" not in amounts
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod_of(job)["tolerations"]


def test_no_gpu_asks_for_none() -> None:
    assert "nvidia.com/gpu" not in main_of(shaped(gpus=0))["resources"]["requests"]


def test_other_requests_of_a_template_remain() -> None:
    objects = shipped()
    objects[0]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"rdma/hca": "1", "cpu": "64"}}
    job = shape(PLUGINS_JOB, read_template(objects[0]), RuleJob("x", threads=2), OWNER, {})
    assert main_of(job)["resources"]["limits"] == {"rdma/hca": "1", "cpu": "2"}


def test_a_queue_label_goes_only_to_the_job() -> None:
    objects = shipped()
    objects[0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    objects[0]["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "note": "x"}
    job = shape(PLUGINS_JOB, read_template(objects[0]), RuleJob("x"), OWNER, {})
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "kueue.x-k8s.io/queue-name" not in job["spec"]["template"]["metadata"]["labels"]
    assert set(job["metadata"]["annotations"]) == {"note", "vlmflow/wildcards"}


def test_defaults_of_the_api_server_do_not_reach_the_pod() -> None:
    objects = shipped()
    objects[0]["template"]["spec"]["restartPolicy"] = "Always"
    assert pod_of(shape(PLUGINS_JOB, read_template(objects[0]), RuleJob("x"), OWNER, {}))["restartPolicy"] == "Never"


def test_nothing_given_is_changed() -> None:
    before = deepcopy(PLUGINS_JOB)
    shaped(gpus=2)
    assert before == PLUGINS_JOB


@pytest.mark.parametrize(
    ("secret", "key", "holder"),
    [("hf-token", "HF_TOKEN", "fetch"), ("answer-key", "VLMFLOW_ANSWER_KEY", "answer")],
)
def test_only_one_template_holds_a_secret(secret: str, key: str, holder: str) -> None:
    """And its pods start without it."""
    (found,) = [one for one in shipped() if secret in yaml.safe_dump(one)]
    assert found["metadata"]["name"] == holder
    (variable,) = [one for one in read_template(found).spec["containers"][0]["env"] if one["name"] == key]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": secret, "key": key, "optional": True}}


@pytest.mark.parametrize("found", shipped(), ids=lambda found: found["metadata"]["name"])
def test_shipped_templates_are_restricted(found: dict) -> None:
    spec = read_template(found).spec
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["template"]["spec"]["containers"][0].update(name="main"), "no container named snakemake"),
        (lambda found: found["template"]["spec"]["containers"][0].update(args=["x"]), "must not set args"),
        (lambda found: found["template"]["spec"]["containers"][0].update(image="a/b:latest"), "no tag or digest"),
        (lambda found: found["template"]["spec"]["containers"][0].update(image="host:5000/b"), "no tag or digest"),
        (lambda found: found["template"]["spec"].update(activeDeadlineSeconds=5), "activeDeadlineSeconds"),
        (lambda found: found["metadata"].update(annotations={"vlmflow/gpu-resource": "gpu"}), "vlmflow/gpu-resource"),
        (lambda found: found["metadata"].update(annotations={"vlmflow/pending-limit": "1h"}), "vlmflow/pending-limit"),
        (lambda found: found["template"]["spec"].update(automountServiceAccountToken=True), "may not hold a token"),
        (lambda found: found["template"]["spec"].pop("automountServiceAccountToken"), "may not hold a token"),
        (lambda found: found["template"]["spec"].update(serviceAccountName="vlmflow-controller"), "the controller's"),
        (lambda found: with_volume(found, persistentVolumeClaim={"claimName": "controller-state"}), "executes"),
        (lambda found: with_volume(found, persistentVolumeClaim={"claimName": "controller-state-ann"}), "executes"),
        (
            lambda found: with_volume(found, projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
            "API server",
        ),
    ],
)
def test_wrong_templates_are_refused(change: object, said: str) -> None:
    found = shipped()[0]
    change(found)
    with pytest.raises(VlmflowError, match=said) as refused:
        read_template(found)
    assert "pod template default" in refused.value.cause


def test_a_token_for_another_audience_is_none_for_the_api_server() -> None:
    found = shipped()[0]
    token = {"path": "token", "audience": "sts.amazonaws.com", "expirationSeconds": 3600}
    with_volume(found, projected={"sources": [{"serviceAccountToken": token}]})
    read_template(found)


def test_a_profile_that_gives_pods_the_controllers_state_is_refused() -> None:
    plugins = deepcopy(PLUGINS_JOB)
    claim = {"name": "state", "persistentVolumeClaim": {"claimName": "controller-state"}}
    plugins["spec"]["template"]["spec"]["volumes"].append(claim)
    with pytest.raises(VlmflowError, match="the pod of train_model run=a: volume state is the claim controller-state"):
        shape(plugins, read_template(shipped()[0]), RuleJob("train_model", {"run": "a"}), OWNER, {})


def test_sources_are_unpacked_where_no_other_pod_writes() -> None:
    deploy = "python -m snakemake --deploy-sources /outputs/targets/s.tar.xz 0af1 --default-storage-provider fs"
    run = "python -m snakemake --snakefile Snakefile --local-storage-prefix /outputs/.pods/x"
    plugins = deepcopy(PLUGINS_JOB)
    plugins["spec"]["template"]["spec"]["containers"][0]["args"] = ["-c", f"pip install x && {deploy} && {run}"]
    job = shape(plugins, read_template(shipped()[0]), RuleJob("x"), OWNER, {})
    assert main_of(job)["args"][1] == (
        f"trap : TERM; pip install x && {deploy} --local-storage-prefix /workdir/.sources && {run}"
    )


def test_a_missing_template_is_named() -> None:
    with pytest.raises(VlmflowError, match="namespace here has no pod template gpu"):
        read_templates([found for found in shipped() if found["metadata"]["name"] != "gpu"], "here")


def test_the_template_of_a_job() -> None:
    templates = read_templates(shipped(), "vlmflow")
    assert choose(templates, None, 0).name == "default"
    assert choose(templates, None, 4).name == "gpu"
    assert choose(templates, "fetch", 0).name == "fetch"
    with pytest.raises(VlmflowError, match="'big'"):
        choose(templates, "big", 0)


def test_merge_rules() -> None:
    base = {
        "volumes": [{"name": "a", "emptyDir": {}}],
        "containers": [{"name": "x", "image": "1", "tty": True}],
        "tolerations": [{"key": "t"}],
        "nodeSelector": {"a": "1"},
        "command": ["sh"],
    }
    patch = {
        "volumes": [{"name": "a", "hostPath": {}}, {"name": "b", "emptyDir": {}}],
        "containers": [{"name": "x", "image": "2"}, {"name": "y", "image": "3"}],
        "tolerations": [{"key": "t"}, {"key": "u"}],
        "nodeSelector": {"b": "2"},
        "command": ["tini"],
    }
    assert merge(base, patch) == {
        "volumes": [{"name": "a", "hostPath": {}}, {"name": "b", "emptyDir": {}}],
        "containers": [{"name": "x", "image": "2", "tty": True}, {"name": "y", "image": "3"}],
        "tolerations": [{"key": "t"}, {"key": "u"}],
        "nodeSelector": {"a": "1", "b": "2"},
        "command": ["tini"],
    }


@pytest.mark.parametrize(("text", "value"), [("a/b c", "a-b-c"), ("x" * 80, "x" * 63), ("-a-", "a"), ("", "")])
def test_label_values(text: str, value: str) -> None:
    assert label_value(text) == value


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: snakemake", "name: main", "pod template gpu: has no container named snakemake"),
        ("suspend: true", "suspend: false", "pod template gpu: its CronJob lacks spec.suspend: true"),
        ("restartPolicy: Never", "restartPolicy: [Never", "expected ',' or ']'"),
        ("containers:", "containers: 7\n          others:", "does not describe Kubernetes objects"),
        ("kind: CronJob", "sort: CronJob", "does not describe Kubernetes objects"),
    ],
)
def test_a_checkouts_templates_are_checked_by_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    check_files(FOLDER)
    text = (FOLDER / "gpu.yaml").read_text()
    assert old in text
    (tmp_path / "gpu.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(VlmflowError) as failure:
        check_files(tmp_path)
    assert f"{tmp_path}/gpu.yaml" in str(failure.value)
    assert says in str(failure.value)


def test_a_wrong_template_is_refused_when_the_workflow_is_read(tmp_path: Path) -> None:
    """A dry run for the cluster needs no cluster; a local one has no pods, so no templates."""
    files = clone(tmp_path / "clone")
    template = files / "k8s/templates/gpu.yaml"
    template.write_text(template.read_text().replace("name: snakemake", "name: main"))
    (files / "pictures").mkdir()
    dry = [sys.executable, "-m", "snakemake", "-n", "merged/qwen3vl-fire"]
    local = called(dry, files)
    assert local.returncode == 0, local.stderr
    environment = os.environ | {"VLMFLOW_NAMESPACE": "vlmflow"}
    there = [*dry, "--profile", "profiles/kubernetes", "--default-storage-prefix", str(tmp_path / "targets")]
    refused = called(there, files, environment)
    assert refused.returncode == 1
    assert "pod template gpu: has no container named snakemake" in refused.stderr
    assert "Traceback" not in refused.stderr
