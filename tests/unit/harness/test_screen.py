"""What people read while the workflow runs: messages of stages, notes of a plan, and a sign of life every minute."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forked_snakemake import called
from made_accounts import some_fitted, some_stats
from small_workflow import make_rows, snakemake
from vlmflow.config.model import Config, check_config
from vlmflow.core.account import write_account
from vlmflow.harness import screen
from vlmflow.harness.plan import notes
from vlmflow.harness.stage import complete_commands
from vlmflow.harness.start import tell_stages
from workflow_runs import ROOT, vlmflow

ABOUT_ITSELF = (
    "Assuming unrestricted",
    "SNAKEMAKE",
    "Building DAG",
    "Using shell",
    "Provided cores",
    "Singularity containers",
    "Select jobs",
    "Execute 1 jobs",
    "Finished jobid",
)


def reasons(said: str) -> list[str]:
    return re.findall(r"^Reason: (.*)$", said, re.MULTILINE)


def test_a_run_is_its_jobs_and_how_far_they_are(tmp_path: Path) -> None:
    said = snakemake(make_rows(tmp_path), "raw/x/rows.jsonl")
    assert [words for words in ABOUT_ITSELF if words in said] == []
    assert len(re.findall(r"^\[.* \d{4}\] Fetching rows\.jsonl$", said, re.MULTILINE)) == 1
    assert len(reasons(said)) == 1
    assert "1 of 1 steps (100%) done" in said
    named = re.search(r"^Complete log\(s\): (.+)$", said, re.MULTILINE)
    assert [words for words in ABOUT_ITSELF if words not in Path(named[1]).read_text()] == []


def test_a_plan_gives_the_first_cause_of_a_chain(tmp_path: Path) -> None:
    said = snakemake(make_rows(tmp_path), "reports/data-x.html", "-n")
    assert reasons(said) == ["Missing output files: reports/data-x.html"]
    assert said.count("Job stats:") == 1
    assert "provenance information" not in said
    complete = snakemake(tmp_path, "reports/data-x.html", "-n", "--verbose")
    assert len(reasons(complete)) == complete.count("Input files updated by another job") + 1 == 5
    assert "SNAKEMAKE" in complete


def test_what_is_said_of_ctrl_c_and_sigterm_is_shown() -> None:
    scheduler = SimpleNamespace(_user_kill=None)
    shown = screen._Filter(SimpleNamespace(dryrun=False, scheduler=scheduler)).filter
    record = logging.makeLogRecord({"levelno": logging.INFO, "module": "job_scheduler", "funcName": "schedule"})
    assert not shown(record)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert shown(record)
    scheduler._user_kill = "graceful"
    assert shown(record)


FILES = [ROOT / "profiles/kubernetes/stores.yaml", Path("/home/ann/my run.yaml")]
GIVEN = "profiles/kubernetes/stores.yaml '/home/ann/my run.yaml'"
OVER = GIVEN.replace(" '", " --also '")
CALL = f"--configfile {GIVEN}"
REFRESH = "vlmflow refresh-pictures FILE fire"
FIT = "fit them again: snakemake --forcerun fit_rows -- "


def told(
    monkeypatch: pytest.MonkeyPatch,
    prefix: str | None,
    files: list[Path] = FILES,
    config: list[str] | None = None,
    folder: Path = ROOT,
) -> None:
    """Tell stages about a call. prefix: the storage prefix, if the stage runs in a pod."""
    monkeypatch.chdir(folder)
    for name in ("INTEGRITY", "RECORDS", "CONFIG", "CALL", "TARGETS", "LOCAL"):
        monkeypatch.setenv(f"VLMFLOW_{name}", "left from elsewhere")
    workflow = SimpleNamespace(
        basedir=str(ROOT),
        overwrite_configfiles=files,
        remote_exec=prefix is not None,
        storage_settings=SimpleNamespace(
            default_storage_provider=prefix and prefix.partition(":")[0],
            default_storage_prefix=prefix,
            local_storage_prefix=Path("/outputs/.pods/p1"),
        ),
        config_settings=SimpleNamespace(config_args=config or []),
    )
    tell_stages(workflow, Config(models={}, datasets={}, runs={}))


def test_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "relative:/theirs")
    told(monkeypatch, None)
    assert os.environ["PYTHONPATH"] == f"{ROOT / 'scripts'}:/theirs", "a stage finds the packages beside its folder"
    assert complete_commands(f"x: {REFRESH}") == f"x: vlmflow refresh-pictures {OVER} fire"
    assert complete_commands(f"{FIT}fitted/a") == f"fit them again: vlmflow run {OVER} fitted/a --forcerun fit_rows"
    told(monkeypatch, None, [])
    snakemake = "snakemake --forcerun"
    assert complete_commands(f"{REFRESH}; {FIT}fitted/a") == (
        f"{snakemake} resolve_images -- data/fire/stats.json; fit them again: {snakemake} fit_rows -- fitted/a"
    )


def test_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A person stands there, or names it: the paths of the command are those of both."""
    told(monkeypatch, None, folder=tmp_path)
    over = OVER.replace("profiles/", f"{ROOT}/profiles/")
    assert complete_commands(REFRESH) == f"vlmflow refresh-pictures {over} fire --directory {tmp_path}"
    monkeypatch.chdir(ROOT / "profiles")
    told(monkeypatch, None, folder=ROOT / "profiles")
    assert complete_commands(REFRESH) == f"vlmflow refresh-pictures {over} fire --directory {ROOT / 'profiles'}"


def test_in_a_pod_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod and its folder are gone when somebody reads the message; targets are on the volume."""
    told(monkeypatch, "/outputs/targets")
    assert complete_commands(REFRESH) == (f"vlmflow cluster run {OVER} data/fire/stats.json --forcerun resolve_images")
    seen = "/outputs/.pods/p1/fs/outputs/targets/fitted/a"
    assert complete_commands(f"{seen}: {FIT}{seen}") == (
        f"/outputs/targets/fitted/a: fit them again: vlmflow cluster run {OVER} fitted/a --forcerun fit_rows"
    )


def test_in_a_pod_that_a_laptop_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no controller."""
    told(monkeypatch, "s3://bucket")
    snakemake = f"snakemake --profile profiles/kubernetes-s3 --executor kubernetes {CALL} --forcerun"
    assert complete_commands(REFRESH) == f"{snakemake} resolve_images -- data/fire/stats.json"
    seen = "/outputs/.pods/p1/s3/bucket/fitted/a"
    assert complete_commands(f"{seen}: {FIT}{seen}") == (
        f"s3://bucket/fitted/a: fit them again: {snakemake} fit_rows -- fitted/a"
    )


def test_the_controller_takes_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is given a call of Snakemake that checks the pictures again, with the first call's options."""
    files = [ROOT / "config.yaml", FILES[0]]
    told(monkeypatch, "/outputs/targets", files, [f'datasets={{"fire": {{"image_roots": ["{tmp_path}"]}}}}'])
    name, *words = shlex.split(complete_commands(REFRESH))
    assert name == "vlmflow"
    code = (
        "import json; from vlmflow.remote.cluster import controller; from vlmflow.command import main; "
        "controller.run = lambda cluster, *words: print(json.dumps(words)); main()"
    )
    environment = os.environ | {"KUBECTL": "/bin/true"}
    said = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, check=True).stdout
    call = [sys.executable, "-m", "snakemake", "--directory", str(tmp_path), "-n", *json.loads(said)]
    planned = called(call, ROOT)
    assert planned.returncode == 0, planned.stderr[-2000:]
    assert "Checking the pictures that the train split of fire names" in planned.stdout + planned.stderr


SETTINGS = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [])


def test_bad_text_is_told_once_for_each_data_set_that_is_known(tmp_path: Path) -> None:
    runs = ["qwen3vl-fire", "qwen3vl-fire-good", "qwen3-alpaca"]
    assert notes(SETTINGS, runs, tmp_path) == []
    for dataset, trained in (("fire", {3: 46, 10: 54}), ("fire-good", {10: 54}), ("alpaca", {})):
        stats = some_stats(dataset=dataset, trained_characters=trained)
        (tmp_path / "data" / dataset).mkdir(parents=True)
        write_account(tmp_path / "data" / dataset / "stats.json", stats)
    said = "46% of the trained text is attempts scored below 8; run qwen3vl-fire-good trains the others"
    assert [line for line in notes(SETTINGS, runs, tmp_path) if "data set" in line] == [f"data set fire: {said}"]
    (tmp_path / "data" / "fire" / "stats.json").write_text("{}")
    assert [line for line in notes(SETTINGS, runs, tmp_path) if "data set" in line] == [], "of another version"


def test_a_model_that_is_not_supported_is_told(tmp_path: Path) -> None:
    both = yaml.safe_load((ROOT / "config.yaml").read_text())
    both["models"]["qwen3-8b"]["model_type"] = "gemma3n"
    (line,) = notes(check_config(both, []), ["qwen3vl-fire", "qwen3-alpaca"], tmp_path)
    assert line.startswith("models.qwen3-8b.model_type: gemma3n: no test has taken such a model")


def test_the_steps_of_a_run_are_told_with_what_there_is_to_choose_from(tmp_path: Path) -> None:
    """From the rows of the data set, and from those that fit once that is known."""
    for dataset, rows in (("fire", 384), ("alpaca", 1_000)):
        (tmp_path / "data" / dataset).mkdir(parents=True)
        stats = some_stats(dataset=dataset, examples={"train": rows, "val": 9, "test": 0})
        write_account(tmp_path / "data" / dataset / "stats.json", stats)
    runs = ["qwen3vl-fire", "qwen3-alpaca"]
    few = "run qwen3vl-fire: 6 steps, 1 evaluation: nothing to choose from"
    assert notes(SETTINGS, runs, tmp_path) == [few, "run qwen3-alpaca: 96 steps, 11 evaluations"]
    fitted = some_fitted()
    (tmp_path / "fitted" / "qwen3-alpaca").mkdir(parents=True)
    write_account(tmp_path / "fitted" / "qwen3-alpaca" / "account.json", fitted)
    assert fitted.train.lengths.rows == 9
    assert notes(SETTINGS, runs, tmp_path) == [few, "run qwen3-alpaca: 3 steps, 3 evaluations"]


WATCHED = """
import sys, time
from types import SimpleNamespace
from vlmflow.harness import screen
from snakemake.logging import logger

screen.SILENCE = 3
logger.setLevel("INFO")
logger.addHandler(__import__("logging").StreamHandler())
verify = SimpleNamespace(message="Verifying x", log=["logs/verify/x.log"])
train = SimpleNamespace(message=None, rule=SimpleNamespace(name="train"), log=[])
running = []
screen.watch(SimpleNamespace(scheduler=SimpleNamespace(running=running)))
time.sleep(4)
for seconds in range(16):
    print("a stage's line", file=sys.stderr, flush=True)
    running[:] = [verify, train]  # after the first line: until then nobody has written for as long as makes a silence
    time.sleep(0.25)
print("silence", file=sys.stderr, flush=True)
time.sleep(7)
"""


@pytest.mark.lengthy
def test_silence_is_broken_and_nothing_else(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("w") as file:
        call = [sys.executable, "-c", WATCHED]
        subprocess.run(call, stderr=file, env={"PYTHONPATH": str(ROOT / "scripts")}, check=True)
    lines = said.read_text().splitlines()
    assert lines[:17] == [*["a stage's line"] * 16, "silence"]
    assert set(lines[17:]) == {"still running: Verifying x (logs/verify/x.log); train"}


@pytest.mark.parametrize(
    ("command", "does"),
    [("track", "odd�[31m/merged/mine"), ("verify", "take a folder that vlmflow published")],
)
def test_cause_and_next_step_steer_no_terminal(command: str, does: str, tmp_path: Path) -> None:
    folder = tmp_path / "odd\x1b[31m"
    provenance = folder / "merged" / "mine" / "provenance.json"
    provenance.parent.mkdir(parents=True)
    provenance.write_text("{}")
    run = subprocess.run(vlmflow(command, "mine", "--directory", folder), capture_output=True, text=True, check=False)
    assert run.returncode == 1
    cause, step = run.stderr.splitlines()
    assert "odd�[31m/merged/mine/provenance.json: " in cause
    assert step.startswith("  what to do: ")
    assert does in step
    assert "\x1b" not in run.stdout + run.stderr
