"""A job's pod attacks the controller: it finds nothing that the controller executes, and cannot mislead it."""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import images, jobs
from cluster.cluster import Cluster
from cluster.cluster_workflow import ClusterWorkflow
from cluster.deployment import PODS_USER, deployed
from cluster.paths import STATE
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import shape
from vlmflow.remote.kubernetes.templates import read_templates, template_in
from workflow_runs import checkout

NAMESPACE = "vlmflow-takeover"

ROW, TARGET = '{"text": "of mine"}\n', "raw/mine/rows.jsonl"
DATASET = "{mine: {kind: text, modality: text, prompt: Say., train: /cache/rows.jsonl}}"
WORDS = [TARGET, "--config", f"datasets={DATASET}"]

ATTACK = """
import json, os
from pathlib import Path

MINE = {"wanted.json", "kubernetes-owner", "controller.py", "Snakefile"}
PROGRAMS = ("/proc", "/sys", "/usr", "/opt/vlmflow/env")  # the kernel's, and the image's: no other pod sees them
found, wrote = [], []
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in PROGRAMS]
    found += [os.path.join(folder, name) for name in {*folders, *files} & {*MINE, ".snakemake", ".git"}]
for state in ("/controller", "/outputs/controller"):
    try:
        run, code = Path(state, "run"), Path(state, "vlmflow")
        for made in (run, code / ".snakemake"):
            made.mkdir(parents=True, exist_ok=True)
        for name in ("ended.json", "stop"):
            (run / name).unlink(missing_ok=True)
        (run / "wanted.json").write_text('["sh", "-c", "touch /outputs/taken-over"]')
        (code / "Snakefile").write_text("shell('touch /outputs/taken-over')")
        (code / ".snakemake" / "planted").touch()
        wrote.append(state)
    except OSError:
        pass
for link, place in (("targets", "/controller/vlmflow"), (".pods", "/controller")):
    link = Path("/outputs", link)
    if link.is_dir() and not link.is_symlink():
        link.rename(f"{link}-moved-{os.getpid()}-{os.urandom(4).hex()}")
    if not link.is_symlink():
        link.symlink_to(place)
token = os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token")
print(json.dumps({"found": sorted(found), "wrote": wrote, "token": token}))
"""

PRINT_STATE = """
import hashlib, json, os, sys
from pathlib import Path
files = [file for top in ("/controller", "/opt/controller") for file in Path(top).rglob("*") if file.is_file()]
print(json.dumps({str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}))
"""


@pytest.fixture(scope="module")
def workflow(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterWorkflow]:
    """The project on the cluster, with its checkout in the controller, after a finished run."""
    volumes = STATE / "volumes" / NAMESPACE
    shutil.rmtree(volumes, ignore_errors=True)
    (volumes / "cache").mkdir(parents=True)
    (volumes / "cache" / "rows.jsonl").write_text(ROW)
    cluster.carry_in(images.project_image("data"))
    with deployed(cluster, NAMESPACE, volumes):
        cluster.kubectl(f"--namespace={NAMESPACE}", "rollout", "status", "deployment/controller", "--timeout=240s")
        workflow = ClusterWorkflow(
            cluster, NAMESPACE, volumes, checkout(tmp_path_factory.mktemp("person") / "checkout")
        )
        workflow.run(*workflow.small(TARGET, "--version"))
        workflow.in_controller("mkdir", "--parents", ".snakemake/metadata", "/outputs/targets/logs", "/outputs/.pods")
        workflow.in_controller("touch", ".snakemake/metadata/of-a-target")
        yield workflow


def attack(workflow: ClusterWorkflow, template: str) -> dict:
    """Run ATTACK in a job's pod, which the executor makes from the cluster's template.

    In the small image: the template decides what a pod can reach, not the image's packages.
    """
    labels = "app.kubernetes.io/part-of=vlmflow"
    found = list(map(template_in, workflow.cluster.get("cronjobs", namespace=NAMESPACE, labels=labels)["items"]))
    for each in found:
        each["template"]["spec"]["containers"][0]["image"] = images.image_name("data")
    command = ["-c", f"python -c {shlex.quote(ATTACK)}"]
    main = {"name": "snakemake", "command": ["/bin/sh"], "args": command, "workingDir": "/workdir"}
    main["volumeMounts"] = [{"name": "workdir", "mountPath": "/workdir"}]
    pod = {"containers": [main], "volumes": [{"name": "workdir", "emptyDir": {}}], "restartPolicy": "Never"}
    plugins = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"attack-{template}"},
        "spec": {"template": {"spec": pod}},
    }
    rule_job = RuleJob("attack", threads=1, mem_mb=500, disk_mb=100)
    made = shape(plugins, read_templates(found, NAMESPACE)[template], rule_job, {}, {})
    return json.loads(jobs.run(workflow.cluster, made, NAMESPACE).splitlines()[-1])


def state_of(workflow: ClusterWorkflow) -> dict[str, str]:
    """Return the sha256 of everything that the controller executes, and of its requests."""
    return json.loads(workflow.in_controller("python", "-c", PRINT_STATE))


@pytest.mark.parametrize("template", ["default", "gpu"])
def test_a_jobs_pod_finds_nothing_of_the_controller(workflow: ClusterWorkflow, template: str) -> None:
    before = state_of(workflow)
    names = {Path(file).name for file in before}
    assert {"wanted.json", "ended.json", "Snakefile", "controller.py", "of-a-target"} <= names
    said = attack(workflow, template)
    assert said["found"] == [] or set(said["found"]) <= {
        f"/outputs/controller/{name}" for name in ("run/wanted.json", "vlmflow/Snakefile", "vlmflow/.snakemake")
    }  # the previous attack's files
    assert said["wrote"] == ["/outputs/controller"]  # a folder like any other, which nobody reads
    assert not said["token"]
    assert state_of(workflow) == before


def test_the_controller_does_its_own_work_and_not_the_attackers(workflow: ClusterWorkflow) -> None:
    attack(workflow, "default")
    before = state_of(workflow)
    refused = workflow.run(*workflow.small(*WORDS), ends_well=False)
    assert "/outputs/targets is a link" in refused, refused[-3000:]
    after = state_of(workflow)
    changed = {file for file, digest in before.items() if after.get(file) != digest}
    own = ("/controller/run/", "/controller/vlmflow/.git/")  # those of the run and of the push
    assert {file for file in changed if not file.startswith(own)} == set()
    assert [file for file in after if "snakemake-workflow-sources" in file] == []
    assert (workflow.volumes / "outputs" / "targets").is_symlink()
    assert not (workflow.volumes / "outputs" / "taken-over").exists()


def test_a_run_continues_once_the_link_is_removed(workflow: ClusterWorkflow) -> None:
    for name in ("targets", ".pods"):
        if (link := workflow.volumes / "outputs" / name).is_symlink():
            link.unlink()
    left = workflow.volumes / "outputs" / ".pods" / "a-pod-that-went"
    left.mkdir(parents=True, exist_ok=True)
    for place in (left.parent, left):
        os.chown(place, PODS_USER, PODS_USER)
    assert "Removed the folders of 1 pod that ended while no controller was running: a-pod-that-went" in workflow.run(
        *workflow.small(*WORDS)
    )
    assert list(left.parent.iterdir()) == []
    assert (workflow.targets / TARGET).read_text() == ROW
    commands = [pod["spec"]["containers"][0]["args"][1] for pod in workflow.rules()["fetch_rows"]]
    assert all(" --local-storage-prefix /workdir/.sources && " in command for command in commands)
