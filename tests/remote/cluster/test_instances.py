"""Two people in one namespace, each with a vlmflow: what one applies or runs does not touch the other's."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import images
from cluster.cluster import Cluster
from cluster.cluster_workflow import ClusterWorkflow
from cluster.deployment import PODS_USER, having_given, in_namespace, with_instance
from cluster.paths import STATE
from workflow_runs import checkout, vlmflow

NAMESPACE = "vlmflow-shared"
TARGET = "raw/mine/rows.jsonl"
DATASET = "datasets={mine: {kind: text, modality: text, prompt: Say., train: /cache/rows.jsonl}}"


@pytest.fixture(scope="module")
def workflows(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClusterWorkflow]]:
    """One person without an instance, then `ann`, each with their own file on their own cache."""
    volumes = STATE / "volumes" / NAMESPACE
    shutil.rmtree(volumes, ignore_errors=True)
    cluster.carry_in(images.project_image("data"))
    files = checkout(tmp_path_factory.mktemp("person") / "checkout")
    made = [ClusterWorkflow(cluster, NAMESPACE, volumes / name, files, name) for name in ("", "ann")]
    made[0].volumes = volumes / "alone"
    for workflow in made:
        for name in ("cache", "outputs", "controller-state"):
            (workflow.volumes / name).mkdir(parents=True)
        (workflow.volumes / "cache" / "rows.jsonl").write_text(f'{{"text": "of {workflow.instance or "nobody"}"}}\n')
        for place in [*workflow.volumes.iterdir(), *workflow.volumes.glob("cache/*")]:
            os.chown(place, PODS_USER, PODS_USER)
    overlay = with_instance(tmp_path_factory.mktemp("overlay"), "local")
    of_ann = in_namespace(cluster, NAMESPACE, made[1].volumes, overlay=overlay)
    with (
        having_given(cluster, NAMESPACE, made[0].volumes) as of_nobody,
        cluster.having(*(one for one in of_ann if "namespace" not in one["metadata"])),
    ):
        cluster.apply(of_nobody)
        before = versions(cluster)
        cluster.apply([one for one in of_ann if "namespace" in one["metadata"]])
        after = versions(cluster)
        assert before.items() <= after.items()
        assert len(after) == 2 * len(before)
        for name in ("controller", "controller-ann"):
            cluster.kubectl(f"--namespace={NAMESPACE}", "rollout", "status", f"deployment/{name}", "--timeout=240s")
        yield made


def versions(cluster: Cluster) -> dict[tuple[str, str], int]:
    """Return how often the spec of each of our objects was changed."""
    found = {}
    for kind in ("deployments", "persistentvolumeclaims", "cronjobs", "networkpolicies", "roles", "rolebindings"):
        for one in cluster.get(kind, namespace=NAMESPACE, labels="app.kubernetes.io/part-of=vlmflow")["items"]:
            found[kind, one["metadata"]["name"]] = one["metadata"].get("generation", 1)
    return found


def test_two_parallel_runs_use_only_their_own_objects(workflows: list[ClusterWorkflow]) -> None:
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda workflow: workflow.run(*workflow.small(TARGET, "--config", DATASET)), workflows))
    for workflow, text in zip(workflows, said, strict=True):
        assert "of another working directory" not in text
        assert (workflow.targets / TARGET).read_bytes() == (workflow.volumes / "cache" / "rows.jsonl").read_bytes()
    seen = {name: pod for workflow in workflows for name, pod in workflow.pods.items()}
    claims = {}
    for pod in seen.values():
        instance = pod["metadata"]["labels"].get("app.kubernetes.io/instance", "")
        volumes = pod["spec"]["volumes"]
        named = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
        claims.setdefault(instance, set()).update({*named, pod["spec"]["serviceAccountName"]})
    assert claims == {
        "": {"cache", "outputs", "vlmflow-job"},
        "ann": {"cache-ann", "outputs-ann", "vlmflow-job-ann"},
    }


def test_each_sees_and_ends_what_is_theirs(workflows: list[ClusterWorkflow]) -> None:
    for workflow in workflows:
        command = vlmflow("status", "--namespace", NAMESPACE)
        done = subprocess.run(command, env=workflow.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        status = workflow.in_controller("python", "/opt/controller/controller.py", "status")
        assert TARGET in status
        assert "ended with code 0" in status
    assert (
        Path(workflows[0].volumes, "outputs/targets", TARGET).stat().st_ino
        != (workflows[1].targets / TARGET).stat().st_ino
    )
