"""Where jobs run, and which light stages share a job or stay here on Slurm; a machine without it plans as before."""

import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forked_snakemake import called
from slurm_commands import SlurmCommands
from small_workflow import make_rows
from vlmflow.harness import stage
from vlmflow.harness.resources import KINDS, arrange
from workflow_runs import ROOT

ALONE = {
    *("train_smoke", "train_model", "trial", "merge_weights", "verify_tensors", "verify_merged"),
    *("evaluate", "answer", "judge_best"),
}
"""Rules that train, merge, prove or evaluate."""

PARTITION = "PartitionName=cpu Default=YES State=UP MaxTime=UNLIMITED AllowAccounts=ALL\n"
NODE = "NodeName=n CPUEfctv=4 RealMemory=64000 Partitions=cpu\n"


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin before any call has named its executor."""
    monkeypatch.setattr(stage, "_named", [])


def workflow(**changes: Any) -> SimpleNamespace:
    """What a plan needs of Snakemake's workflow. changes: rules, or groups that the call gives."""
    kept: list[str] = []
    limits: dict[str, int | None] = {"_cores": 4}
    return SimpleNamespace(
        rules=[SimpleNamespace(name=name) for name in changes.get("rules", _rules())],
        localrules=lambda *names: kept.extend(names),
        kept=kept,
        limits=limits,
        register_resource=limits.__setitem__,
        resource_settings=SimpleNamespace(cores=4),
        group_settings=SimpleNamespace(overwrite_groups=changes.get("groups", {})),
        storage_settings=SimpleNamespace(default_storage_provider=changes.get("storage")),
        remote_exec=changes.get("remote", False),
    )


def _rules() -> set[str]:
    files = (ROOT / "rules").glob("*.smk")
    return {name for file in files for name in re.findall(r"^ *rule (\w+):", file.read_text(), re.MULTILINE)}


def settings(here: list[str], together: list[str]) -> Any:
    return SimpleNamespace(slurm=SimpleNamespace(here=here, together=together))


def test_each_rule_is_light_once_or_has_jobs_of_its_own() -> None:
    light = [rule for rules in KINDS.values() for rule in rules]
    assert len(light) == len(set(light))
    assert _rules() == set(light) | ALONE
    assert not ALONE & set(light)


def test_light_stages_stay_here_or_share_a_job() -> None:
    given = workflow(groups={"mix_rows": "mine"})
    arrange(given, settings(["fetch"], ["data", "pages"]))
    assert set(given.kept) == set(KINDS["fetch"])
    groups = given.group_settings.overwrite_groups
    assert groups.pop("mix_rows") == "mine", "the call's own"
    assert groups == {rule: kind for kind in ("data", "pages") for rule in KINDS[kind] if rule != "mix_rows"}
    assert given.limits["_cores"] is given.resource_settings.cores is None
    some = workflow(rules=["fetch_rows", "train_model"])
    arrange(some, settings(["fetch"], []))
    assert some.kept == ["fetch_rows"], "Snakemake refuses a rule that is not there"
    assert some.group_settings.overwrite_groups == {}


def test_the_call_itself_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_named_executors", [])
    assert not stage.on_slurm()
    assert not stage.jobs_leave(workflow())
    stage.note_executor("slurm")
    assert stage.on_slurm()
    assert stage.jobs_leave(workflow())
    stage.note_executor("kubernetes")
    assert not stage.on_slurm()


def test_jobs_leave_with_a_default_storage_and_in_jobs_themselves() -> None:
    assert stage.jobs_leave(workflow(storage="s3"))
    assert stage.jobs_leave(workflow(remote=True))


def plan(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Return code and output of a dry run for a data set."""
    (make_rows(folder) / "mine.yaml").write_text(
        "datasets: {x: {kind: prompt_completion, modality: text, train: rows.jsonl}}"
    )
    call = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder, *words]
    call += ["--configfile", folder / "mine.yaml", "-n", "--", "data/x/train.jsonl"]
    done = called(call, env=os.environ | environment)
    return done.returncode, done.stdout + done.stderr


def test_only_on_slurm_stages_share_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmCommands(tmp_path, monkeypatch)
    slurm.answer("sbatch")
    slurm.answer("sacctmgr", fails="Slurm accounting storage is disabled")
    slurm.do("scontrol", f'case "$2" in partition) printf "{PARTITION}";; node) printf "{NODE}";; esac')
    code, there = plan(tmp_path, "--profile", str(ROOT / "profiles" / "slurm"))
    assert code == 0, there
    assert "Group job data" in there
    code, here = plan(tmp_path, "--cores", "1")
    assert code == 0, here
    assert "Group job" not in here
    stats = [said[said.index("Job stats:") :].split("\n\n")[0] for said in (here, there)]
    assert stats[0] == stats[1]


def test_what_a_stage_made_in_the_future_is_named_before_the_first_job(tmp_path: Path) -> None:
    """By a machine whose clock is ahead: Snakemake would remove what is made from it, at the end of a training."""
    make_rows(tmp_path)
    raw = tmp_path / "converted" / "x"
    raw.mkdir(parents=True)
    for name in ("train.jsonl", "train.rejects.jsonl", "train.unread.json"):
        (raw / name).write_text("")
        os.utime(raw / name, (time.time() + 3 * 86_400,) * 2)
    code, said = plan(tmp_path)
    assert code == 1
    assert re.search(r"converted/x/train\.\S+: its time, \S+ \S+, is in the future by this machine's clock\n", said), (
        said
    )


def test_a_machine_without_slurm_is_named_in_a_plan(tmp_path: Path) -> None:
    which = shutil.which("which")
    assert which
    (tmp_path / "which").symlink_to(which)
    code, said = plan(tmp_path, "--profile", str(ROOT / "profiles" / "slurm"), PATH=str(tmp_path))
    assert code == 0
    assert "this machine has no sbatch: it is not a login node of a Slurm cluster; so this plan is not compared" in said
    assert "Traceback" not in said
