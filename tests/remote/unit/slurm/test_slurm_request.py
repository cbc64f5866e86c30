"""What a job asks of Slurm."""

import itertools
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from vlmflow.remote.job import RuleJob
from vlmflow.remote.slurm.request import comment_of, name_of, rule_job_of, sbatch_words, script

TRAIN = {
    "mem_mb": 64_000,
    "runtime": 600,
    "nodes": 1,
    "gpu": 4,
    "warning_seconds": 180,
    "slurm_account": "my account",
    "slurm_partition": "a100",
    "gpu_manufacturer": "nvidia",
}


class Resources(dict[str, Any]):
    """Resources by key and by attribute, as Snakemake gives them."""

    __getattr__ = dict.get


def job(rule: str = "train_model", threads: int = 8, **changes: Any) -> SimpleNamespace:
    """A job as Snakemake gives it. changes: of its resources."""
    return SimpleNamespace(
        name=rule,
        rules=[rule],
        rule=SimpleNamespace(name=rule),
        threads=threads,
        resources=Resources(TRAIN | changes),
        wildcards_dict={"run": "mine"},
        params=SimpleNamespace(run_store="stores/runs"),
        input=SimpleNamespace(rows="fitted/mine"),
        attempt=1,
        is_group=lambda: False,
    )


def words(
    one: SimpleNamespace,
    gpus_by: str = "gpus",
    gpu_model: str | None = None,
    folder: str = "/data/slurm logs",
    **changes: Any,
) -> list[str]:
    """Return the call of sbatch for a job. folder: that of logs. changes: of what its rule declares."""
    return sbatch_words(
        one,
        replace(RuleJob.of(one), **changes),
        "vlmflow a b c",
        slurm=SimpleNamespace(gpus=gpus_by, gpu_model=gpu_model),
        minutes=120,
        log=Path(folder, "%j.log"),
        workdir="/data/a folder",
        partition=" -p a100",
        settings=SimpleNamespace(requeue=False, no_requeue=False, qos=None, reservation=None),
    )


def value(call: list[str], *names: str) -> list[str]:
    """Return the values of an option in all its forms, in the order of the call."""
    found = [word.partition("=")[2] for word in call if word.partition("=")[0] in names and "=" in word]
    return found + [after for word, after in itertools.pairwise(call) if word in names]


def test_a_job_asks_for_what_its_rule_declares() -> None:
    call = words(job())
    assert call[:2] == ["sbatch", "--parsable"]
    expected = {
        ("--job-name",): ["train_model:mine"],
        ("--output",): ["/data/slurm logs/%j.log"],
        ("--comment",): ["vlmflow a b c"],
        ("-A",): ["my account"],
        ("-p",): ["a100"],
        ("-D",): ["/data/a folder"],
        ("-t",): ["120"],
        ("--mem",): ["64000"],
        ("--nodes",): ["1"],
        ("--cpus-per-gpu", "--cpus-per-task", "-c"): ["8"],
        ("--gpus",): ["4"],
        ("--signal",): ["TERM@180"],
        ("--open-mode",): ["append"],
    }
    assert {names: value(call, *names) for names in expected} == expected
    assert call.count("--requeue") == 1
    assert not [word for word in call if word.startswith(("--gres", "--wrap", "--ntasks-per-gpu"))]


@pytest.mark.parametrize(
    ("by", "model", "nodes", "asked"),
    [
        ("gpus", None, 1, "--gpus=4"),
        ("gpus", "a100", 1, "--gpus=a100:4"),
        ("gpus", None, 2, "--gpus-per-node=4"),
        ("gpus", "a100", 2, "--gpus-per-node=a100:4"),
        ("gpus-per-node", None, 1, "--gpus-per-node=4"),
        ("gpus-per-node", "a100", 2, "--gpus-per-node=a100:4"),
        ("gres", None, 1, "--gres=gpu:4"),
        ("gres", "a100", 2, "--gres=gpu:a100:4"),
    ],
)
def test_gpus_are_asked_for_in_the_sites_dialect(by: str, model: str | None, nodes: int, asked: str) -> None:
    call = words(job(nodes=nodes), by, model)
    assert [word for word in call if word.startswith(("--gpus", "--gres"))] == [asked]


@pytest.mark.parametrize("by", ["gpus", "gpus-per-node", "gres"])
def test_without_gpus_nothing_of_them_is_asked_for(by: str) -> None:
    call = words(job("fit_rows", gpu=0, warning_seconds=None), by, "a100")
    assert not [word for word in call if "gpu" in word or word.startswith(("--gres", "--signal"))]
    assert (value(call, "--ntasks"), value(call, "--cpus-per-task", "-c")) == (["1"], ["8"])


def test_several_nodes_have_a_task_each() -> None:
    with_gpus, without = words(job(nodes=2)), words(job(nodes=3, gpu=0))
    for call, nodes in ((with_gpus, "2"), (without, "3")):
        assert value(call, "--nodes") == [nodes]
        assert value(call, "--ntasks-per-node") == ["1"]
    assert value(without, "--ntasks") == ["3"]


def test_what_a_profile_adds_is_in_the_call() -> None:
    call = words(
        job(gpu=0, gres="shard:2,disk:9", slurm_extra="--exclude=n1 --signal=USR1@9", qos="long", constraint="ib")
    )
    assert value(call, "--gres") == ["shard:2,disk:9"]
    assert (value(call, "--qos"), value(call, "-C"), value(call, "--exclude")) == (["long"], ["ib"], ["n1"])
    assert value(call, "--signal") == ["USR1@9"], "the profile's own"
    by_gres = words(job(gres="shard:2"), "gres", "a100")
    assert value(by_gres, "--gres") == ["gpu:a100:4,shard:2"], "of several, Slurm takes the last"
    assert value(words(job(gres="shard:2")), "--gpus", "--gres") == ["4", "shard:2"]
    with pytest.raises(WorkflowError):
        words(job(slurm_extra="--job-name=mine"))


def test_a_job_without_memory_and_time_asks_for_neither() -> None:
    one = job(mem_mb=None, slurm_account=None)
    call = sbatch_words(
        one,
        RuleJob.of(one),
        "vlmflow a b c",
        slurm=SimpleNamespace(gpus="gpus", gpu_model=None),
        minutes=None,
        log=Path("log"),
        workdir="/data",
        partition="",
        settings=None,
    )
    assert value(call, "--mem", "-t", "-A", "-p") == []


COMMAND = "cd '/data/a folder' && export TMPDIR=x; /venv/bin/python -m snakemake --snakefile '/a b/Snakefile' --cores 8"


def test_the_script_makes_the_jobs_snakemake_the_first_process_of_a_step() -> None:
    text = script(COMMAND, "/venv/bin/python", RuleJob("train_model", threads=8))
    assert text.startswith("#!/bin/sh\n")
    assert text.count("\n") == 2
    before, _, step = text.partition(" exec ")
    assert before.endswith("cd '/data/a folder' && export TMPDIR=x; ")
    srun = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--cpu-bind=none"]
    snakemake = ["/venv/bin/python", "-m", "snakemake", "--snakefile", "/a b/Snakefile", "--cores", "8"]
    assert shlex.split(step) == [*srun, *snakemake]


def test_on_several_nodes_the_step_runs_an_agent_on_each() -> None:
    rule_job = RuleJob("train_model", threads=8, nodes=2, runs="stores/my runs/mine")
    call = shlex.split(script(COMMAND, "/venv/bin/python", rule_job).partition(" exec ")[2])
    assert call[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert "--kill-on-bad-exit=1" in call
    (path,) = value(call, "PYTHONPATH")
    module = call.index("vlmflow.remote.slurm.in_job")
    assert (Path(path) / "vlmflow" / "remote" / "slurm" / "in_job.py").is_file()
    assert call[module - 2 :] == [
        *("/venv/bin/python", "-m", "vlmflow.remote.slurm.in_job", "stores/my runs/mine", "8"),
        *("/venv/bin/python", "-m", "snakemake", "--snakefile", "/a b/Snakefile", "--cores", "8"),
    ]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A job with its files, in its working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").touch()
    one = job()
    one.params, one.input, one.output = ["lora", {"max_steps": 50}], ["rows", "later"], ["checkpoints/mine"]
    return one


def changed(what: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(what) | changes)


def test_the_comment_finds_a_job_that_makes_the_same(stage: SimpleNamespace) -> None:
    ours, folder, identity, key = comment_of(stage, "/data").split()
    assert ours == "vlmflow"
    retry = changed(stage, attempt=2, resources=stage.resources | {"mem_mb": 96_000, "runtime": 900})
    again = changed(stage, input=["later", "rows"], params=[*reversed(stage.params)])
    assert comment_of(retry, "/data") == comment_of(again, "/data") == f"vlmflow {folder} {identity} {key}"
    assert comment_of(stage, "/other").split() == ["vlmflow", comment_of(retry, "/other").split()[1], identity, key]
    assert comment_of(stage, "/other").split()[1] != folder


@pytest.mark.parametrize(
    ("change", "same_key"),
    [
        ({"params": ["lora", {"max_steps": 51}]}, True),
        ({"input": ["rows"]}, True),
        ({"output": ["checkpoints/other"]}, True),
        ({"threads": 4}, True),
        ({"resources": TRAIN | {"gpu": 2}}, True),
        ({"resources": TRAIN | {"nodes": 2}}, True),
        ({"wildcards_dict": {"run": "other"}}, False),
        ({"rule": SimpleNamespace(name="train_smoke")}, False),
    ],
)
def test_the_comment_tells_apart_what_makes_something_else(
    stage: SimpleNamespace, change: dict[str, Any], same_key: bool
) -> None:
    before, after = (comment_of(one, "/data").split() for one in (stage, changed(stage, **change)))
    assert before[2] != after[2]
    assert (before[3:] == after[3:]) == same_key


def test_the_comment_changes_with_the_times_of_input(stage: SimpleNamespace) -> None:
    first = comment_of(stage, "/data")
    os.utime("rows", ns=(0, 1))
    second = comment_of(stage, "/data")
    Path("later").touch()
    assert len({first, second, comment_of(stage, "/data")}) == 3


def test_stages_in_one_job_need_room_for_the_largest(stage: SimpleNamespace) -> None:
    small, large = changed(job("convert_rows", 2, mem_mb=9_000), **_files()), changed(job("fit_rows", 1), **_files())
    group = SimpleNamespace(
        groupid="data",
        jobs=[small, large],
        rules=["convert_rows", "fit_rows"],
        threads=3,
        resources={"mem_mb": 73_000, "runtime": 100},
        is_group=lambda: True,
        input=[],
    )
    asked = rule_job_of(group)
    assert (asked.rule, asked.threads, asked.mem_mb, asked.runtime) == ("data", 2, 64_000, 100)
    assert name_of(asked) == "data"
    turned = changed(group, jobs=[large, small])
    assert comment_of(group, "/data") == comment_of(turned, "/data")
    some = comment_of(changed(group, jobs=[large]), "/data").split()
    assert some[3] in comment_of(group, "/data").split()[3:]
    assert some[2] not in comment_of(group, "/data").split()


def _files() -> dict[str, list[str]]:
    return {"params": [], "input": [], "output": []}


@pytest.mark.parametrize("extra", ["--array=0-1", "--exclusive --array 0-1", "-a 0-1", "-a0-1", "--arr=0-1"])
def test_an_array_is_refused(extra: str) -> None:
    with pytest.raises(WorkflowError, match=r"slurm_extra: --array would start the stage several times"):
        words(job(slurm_extra=extra))


@pytest.mark.parametrize("folder", ["/data/50%joint", "/%u/a", "/data/100%%", "/data/%"])
def test_a_percent_sign_in_a_folder_is_no_pattern(folder: str) -> None:
    """sbatch(1), filename pattern."""
    assert value(words(job(), folder=folder), "--output") == [folder.replace("%", "%%") + "/%j.log"]
