"""The commands in a stage's messages: complete, and usable where the workflow was called."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked_snakemake import called
from vlmflow.config.model import Config
from vlmflow.harness.stage import complete_commands
from vlmflow.harness.start import tell_stages
from workflow_runs import ROOT

FILES = [ROOT / "profiles/kubernetes/stores.yaml", Path("/home/ann/my run.yaml")]
GIVEN = "profiles/kubernetes/stores.yaml '/home/ann/my run.yaml'"
CALL = f"--configfile {GIVEN}"
REFRESH = "make refresh-pictures DATASET=fire"
FIT = "fit them again: snakemake --forcerun fit_rows -- "


def told(
    monkeypatch: pytest.MonkeyPatch, prefix: str | None, files: list[Path] = FILES, config: list[str] | None = None
) -> None:
    """Tell stages about a call. prefix: the storage prefix, if the stage runs in a pod."""
    monkeypatch.chdir(ROOT)
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
    assert complete_commands(f"x: {REFRESH}") == f'x: {REFRESH} CONFIG="{GIVEN}"'
    assert (
        complete_commands(f"{FIT}fitted/a")
        == f"fit them again: .venv/bin/snakemake {CALL} --forcerun fit_rows -- fitted/a"
    )
    told(monkeypatch, None, [])
    assert (
        complete_commands(f"{REFRESH}; {FIT}fitted/a")
        == f"{REFRESH}; {FIT.replace('snakemake', '.venv/bin/snakemake')}fitted/a"
    )


def test_in_a_pod_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod and its folder are gone when somebody reads the message; targets are on the volume."""
    told(monkeypatch, "/outputs/targets")
    assert complete_commands(REFRESH) == (
        f'make cluster-run TARGET=data/fire/stats.json CONFIG="{GIVEN}" ARGS="--forcerun resolve_images"'
    )
    seen = "/outputs/.pods/p1/fs/outputs/targets/fitted/a"
    assert complete_commands(f"{seen}: {FIT}{seen}") == (
        "/outputs/targets/fitted/a: fit them again: "
        f'make cluster-run TARGET=fitted/a CONFIG="{GIVEN}" ARGS="--forcerun fit_rows"'
    )


def test_in_a_pod_that_a_laptop_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no controller."""
    told(monkeypatch, "s3://bucket")
    snakemake = f".venv/bin/snakemake --profile profiles/kubernetes-s3 --executor kubernetes {CALL} --forcerun"
    assert complete_commands(REFRESH) == f"{snakemake} resolve_images -- data/fire/stats.json"
    seen = "/outputs/.pods/p1/s3/bucket/fitted/a"
    assert complete_commands(f"{seen}: {FIT}{seen}") == (
        f"s3://bucket/fitted/a: fit them again: {snakemake} fit_rows -- fitted/a"
    )


def test_the_controller_takes_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is given a call of Snakemake that checks the pictures again, with the first call's options."""
    mine = tmp_path / "my run.yaml"
    mine.write_text(f"datasets: {{fire: {{image_roots: ['{tmp_path}']}}}}")
    told(monkeypatch, "/outputs/targets", [FILES[0], mine], ['models={"a": {"source": "/m", "model_type": "qwen3"}}'])
    words = shlex.split(complete_commands(REFRESH))
    done = subprocess.run([words[0], "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, said = done.stdout.splitlines()[-1].partition("vlmflow.remote.cluster.controller --namespace vlmflow run -- ")
    call = [sys.executable, "-m", "snakemake", "--directory", str(tmp_path), "-n", *shlex.split(said)]
    planned = called(call, ROOT)
    assert planned.returncode == 0, planned.stderr[-2000:]
    assert "Checking the pictures that the train split of fire names" in planned.stdout + planned.stderr
