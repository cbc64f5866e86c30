"""The whole demo in pods, through the controller: every rule, from raw rows to verified merged weights."""

import json
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from cluster.cluster_workflow import TOKEN, TWO_CORES, ClusterWorkflow
from cluster.deployment import in_namespace, with_component
from cluster.images import project_image
from cluster.paths import STATE
from vlmflow.core.account import read_account
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.harness.resources import LOGS_MB, TRAINING_MB
from vlmflow.remote.kubernetes.job_shape import PULL_SECONDS
from vlmflow.remote.kubernetes.waiting import quantity
from workflow_runs import ROOT, RUN, VERSION

ONE_JOB_EACH = {
    *("fetch_model", "fetch_model_files", "validate_sharegpt", "measure_lengths", "estimate_run", "fit_rows"),
    *(
        "choose_rows",
        "train_smoke",
        "train_model",
        "merge_weights",
        "verify_tensors",
        "verify_merged",
        "publish_merged",
    ),
}
ONE_JOB_PER_SPLIT = {"fetch_rows", "resolve_images", "convert_rows"}


def test_the_weights_are_the_local_runs(finished: ClusterWorkflow, demo: Path) -> None:
    here, there = demo / "merged" / RUN, finished.targets / "merged" / RUN
    names = sorted(path.relative_to(here) for path in here.rglob("*.safetensors"))
    assert names
    assert {name: sha256_of(there / name) for name in names} == {name: sha256_of(here / name) for name in names}
    for split in ("train", "val", "test"):
        rows = Path("data", "fire", f"{split}.jsonl")
        assert (finished.targets / rows).read_bytes() == (demo / rows).read_bytes()


def test_every_job_had_a_pod_of_its_own(finished: ClusterWorkflow) -> None:
    counts = {rule: len(pods) for rule, pods in finished.rules().items()}
    assert counts == dict.fromkeys(ONE_JOB_EACH, 1) | dict.fromkeys(ONE_JOB_PER_SPLIT, 2)


def declared(rule: str, resource: str) -> int:
    """Read what a rule file declares: a number, a key of the run's settings, or the disk for logs on a volume."""
    text = (ROOT / "rules" / f"{rule}.smk").read_text()
    of_functions = {"weights_disk": LOGS_MB, "fetched_disk": LOGS_MB, "train_disk": TRAINING_MB}
    if function := re.search(rf"^ +{resource}=resources\.(\w+),$", text, re.MULTILINE):
        return of_functions[function[1]]
    found = re.search(
        rf"^ +{resource}=(?:([\d_]+)|lookup\(dpath=\"runs/{{run}}/resources/(\w+)\".*),(?:  #.*)?$", text, re.MULTILINE
    )
    demo = yaml.safe_load((ROOT / "profiles" / "demo" / "run.yaml").read_text())["runs"][RUN]["resources"]
    return int(found[1]) if found[1] else int(demo[found[2]])


def test_requests_and_limits_are_what_the_rules_declare(finished: ClusterWorkflow) -> None:
    for rule, pods in finished.rules().items():
        for pod in pods:
            container = next(each for each in pod["spec"]["containers"] if each["name"] == "snakemake")
            wanted = {
                "cpu": 2 if rule in TWO_CORES else 1,
                "memory": declared(rule, "mem_mb") * 1e6,
                "ephemeral-storage": declared(rule, "disk_mb") * 1e6,
            }
            if rule == "train_model":
                wanted["nvidia.com/gpu"] = 4
            for kind in ("requests", "limits"):
                given = {name: quantity(amount) for name, amount in container["resources"][kind].items()}
                assert given == wanted, (rule, kind)
            assert pod["spec"]["activeDeadlineSeconds"] == declared(rule, "runtime") * 60 + PULL_SECONDS
            with_torch = rule.startswith(("measure_", "fit_", "choose_", "estimate_", "train_", "merge_", "verify_"))
            image = "train" if with_torch else "data"
            assert container["image"].startswith(f"vlmflow/{image}:"), rule


def test_the_token_is_in_no_file_log_or_object(finished: ClusterWorkflow) -> None:
    fetched = [pod for pod in finished.pods.values() if "HF_TOKEN" in str(pod)]
    assert {pod["metadata"]["labels"]["vlmflow/rule"] for pod in fetched} == {
        "fetch_rows",
        "fetch_model",
        "fetch_model_files",
    }
    found = [path for path in finished.volumes.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert found == []
    assert TOKEN not in (STATE / "said.txt").read_text()
    objects = ("pods", "jobs", "events", "configmaps", "cronjobs", "deployments")
    for kind in objects:
        assert TOKEN not in str(finished.cluster.get(kind, namespace=finished.namespace))
    assert TOKEN not in str(finished.pods)


def test_targets_are_downloaded_and_files_are_uploaded(finished: ClusterWorkflow, tmp_path: Path) -> None:
    def copy(*words: object) -> None:
        subprocess.run(finished.ask(*map(str, words)), env=finished.environment, check=True)

    here, there = tmp_path / "merged", finished.targets / "merged" / RUN
    copy("get", f"merged/{RUN}", here)
    copy("put", here, "/cache/brought")
    copy("get", "/cache/brought", tmp_path / "again")
    names = {file.name for file in there.iterdir()} - {".snakemake_timestamp"}
    for folder in (here, tmp_path / "again"):
        assert {file.name: sha256_of(file) for file in folder.iterdir()} == {
            name: sha256_of(there / name) for name in names
        }


def test_a_second_call_finds_nothing_to_do_and_a_changed_option_reruns_what_is_stale(finished: ClusterWorkflow) -> None:
    finished.forget_pods()
    assert "Nothing to be done" in finished.run(*finished.words())
    assert finished.pods == {}
    finished.run(*finished.words("--config", "datasets={fire: {licence: mit}}"))
    assert set(finished.rules()) == {"publish_merged"}


@pytest.mark.slow
def test_the_run_is_evaluated_in_a_pod(finished: ClusterWorkflow) -> None:
    said = finished.run(*finished.words(targets=[f"eval/{RUN}/test", f"reports/eval-{RUN}.html"]))
    assert "rule train_model" not in said
    report = read_account(finished.targets / "eval" / RUN / "test" / "report.json", EvaluationReport)
    assert report.looks == 1
    assert report.rows > 0
    assert (finished.volumes / "outputs" / "evaluations" / "looks.jsonl").is_file()
    assert (finished.targets / "reports" / f"eval-{RUN}.html").is_file()


@pytest.mark.slow
def test_the_run_is_tracked_in_a_pod(finished: ClusterWorkflow, tmp_path: Path) -> None:
    cluster, namespace = finished.cluster, finished.namespace
    cluster.carry_in(project_image("track"))
    overlay = with_component(tmp_path / "k8s", "local", "trackers")
    objects = in_namespace(cluster, namespace, finished.volumes, overlay=overlay)
    cluster.apply([one for one in objects if one["metadata"]["name"] in ("track", "track-reaches-trackers")])
    block = {"track": {"mlflow": "sqlite:////outputs/mlflow.db", "wandb": "demo"}}
    words = finished.words("--config", f"runs={json.dumps({RUN: block})}", targets=[f"tracked/{RUN}.json"])
    assert "rule train_model" not in finished.run(*words)
    assert (finished.targets / "tracked" / f"{RUN}.json").is_file()
    outputs = finished.volumes / "outputs"
    assert [*(outputs / "trackers" / "wandb").rglob("run-*.wandb")]
    with closing(sqlite3.connect(outputs / "mlflow.db")) as database:
        assert database.execute("select name, status from runs").fetchall() == [(RUN, "FINISHED")]
    pods = finished.rules()["track"]
    assert {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {
        f"vlmflow/track:{VERSION}"
    }


@pytest.mark.slow
def test_two_trials_of_a_search_train_side_by_side(finished: ClusterWorkflow) -> None:
    """The run's own settings, and others."""
    finished.cluster.carry_in(project_image("search"))
    choice = finished.targets / "chosen" / RUN / "val" / "account.json"  # of a val too small to recommend a trial
    choice.write_text(json.dumps(json.loads(choice.read_text()) | {"all_groups": 100}))
    search = {"rates": {"run": RUN, "space": {"learning_rate": [0.01, 0.003]}, "rounds": 1, "together": 1}}
    targets = ["search/rates/best.yaml", "reports/search-rates.html"]
    words = finished.words("--config", f"search={json.dumps(search)}", targets=targets)
    at = words.index("--set-threads") + 1
    said = finished.run(*words[:at], "trial=1", *words[at:])
    assert "rule train_model" not in said
    best = yaml.safe_load((finished.targets / "search" / "rates" / "best.yaml").read_text())
    assert best["runs"][RUN]["train"]["learning_rate"] in (0.01, 0.003)
    pods = finished.rules()
    assert {len(pods[rule]) for rule in ("propose", "tell", "judge_best", "choose_best", "search_page")} == {1}
    images = {pod["spec"]["containers"][0]["image"] for rule in ("propose", "tell") for pod in pods[rule]}
    assert images == {f"vlmflow/search:{VERSION}"}
    times = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in pods["trial"]]
    assert len(times) == 2
    assert max(each["startedAt"] for each in times) < min(each["finishedAt"] for each in times)
