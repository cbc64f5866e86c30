"""What is refused when the workflow is read, or before its first job, and the messages."""

import fcntl
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from forked_snakemake import called
from made_accounts import some_stats
from vlmflow.core.account import write_account
from workflow_runs import ROOT, vlmflow


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "pictures").mkdir(exist_ok=True)  # the picture root of config.yaml
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    return called([*command, "--cores", "1", *words])


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ("runs: {qwen3vl-fire: {train: {learning_rat: 1}}}", "runs.qwen3vl-fire.train.learning_rat: unknown key"),
        ("picture_sources: {own: {archive: 'https://x/y.zip'}}", "picture_sources.own.members: missing; it must be"),
    ],
)
def test_a_wrong_configuration_is_refused_when_the_workflow_is_read(tmp_path: Path, overlay: str, said: str) -> None:
    file = tmp_path / "my-run.yaml"
    file.write_text(overlay)
    done = call(tmp_path, "-n", "--configfile", str(file), "--", "merged/qwen3vl-fire")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"{file}: " in output or "picture_sources.own" in said
    assert said in output
    assert "Traceback" not in output


def test_an_unset_variable_in_the_address_of_the_targets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLMFLOW_BUCKET", raising=False)
    done = call(tmp_path, "-n", "--profile", str(ROOT / "profiles" / "kubernetes-s3"), "--", "merged/qwen3vl-fire")
    assert done.returncode != 0
    assert "s3://$VLMFLOW_BUCKET: the environment variable VLMFLOW_BUCKET is not set" in done.stderr
    assert "Traceback" not in done.stderr


BOMB = "a: &a [x]\n" + "".join(
    f"{key}: &{key} [{','.join(['*' + before] * 30)}]\n" for before, key in pairwise("abcdefg")
)
"""A list of which 30⁶ are in the last line."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: {}\nruns: {}\n", ", line 2, column 1: the key 'runs' is already in line 1"),
        (BOMB, ", line 5, column 4: more than 100,000 values, with aliases expanded"),
    ],
)
def test_what_snakemake_would_accept_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    """Its own reader uses the last of two keys. Of a file that it cannot read it says no more than that."""
    file = tmp_path / "my-run.yaml"
    file.write_text(text)
    done = call(tmp_path, "-n", "--configfile", str(file), "--", "merged/r")
    assert done.returncode == 1
    assert f"{file}{said}" in done.stderr
    assert "Traceback" not in done.stderr


def check(file: Path, *also: Path, command: str = "check") -> subprocess.CompletedProcess[str]:
    words = vlmflow(command, file, *(word for other in also for word in ("--also", other)))
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["check", "run"])
def test_broken_yaml_is_refused_with_file_and_line(tmp_path: Path, command: str) -> None:
    file = tmp_path / "my-run.yaml"
    file.write_text("runs:\n  r: {model: m\n  b: [\n")
    done = check(file, command=command)
    assert done.returncode == 1
    assert f"{file}, line 3, column 4: " in done.stderr
    assert "; the line is: b: [" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_names_the_runs_or_every_fault(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.yaml"
    right.write_text('{\n\t"runs": {"mine": {"model": "qwen3-8b", "dataset": "alpaca"}}\n}\n')
    done = check(right)
    assert (done.stdout, done.stderr) == (f"{right}: no errors; runs: mine\n", "")
    other = tmp_path / "other.yaml"
    other.write_text("models: {qwen3-8b: {model_type: seed_oss}}")
    assert check(right, other).stderr.startswith("models.qwen3-8b.model_type: seed_oss: no test has ")
    wrong.write_text("runs: {mine: {processes: 0, train: {swift_args: {output_dir: x}}}}")
    done = check(right, wrong)
    assert done.returncode == 1
    assert f"{wrong}: runs.mine.processes: 0 is not allowed" in done.stderr
    assert f"{wrong}: runs.mine.train.swift_args.output_dir: 'x' is not allowed" in done.stderr
    assert "qwen3-alpaca" in check(ROOT / "config.yaml").stdout


def test_a_former_name_of_a_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "fixed.jsonl").write_text("{}")
    (tmp_path / "t.json").write_text("[]")
    file = tmp_path / "mine.yaml"
    block = {"train": str(tmp_path / "t.json"), "test": None, "mended": str(tmp_path / "fixed.jsonl")}
    file.write_text(yaml.safe_dump({"datasets": {"fire": block}}))
    planned = call(tmp_path, "-n", "--configfile", str(file), "--", "data/fire/stats.json")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    for said in (planned.stderr, check(file).stderr):
        assert "datasets.fire.mended: is now called fixed_rows; rename the key" in said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("merged/qwen3vl-fir", "nearest: merged/qwen3vl-fire"),
        ("./reports/data-fyre.html", "nearest: reports/data-fire.html"),
        ("qwen3vl-fire", "what to do: use one from docs/outputs.md; runs: qwen3vl-fire, "),
    ],
)
def test_a_target_that_no_rule_makes_is_refused_with_the_nearest(tmp_path: Path, target: str, said: str) -> None:
    done = call(tmp_path, "-n", "--", "raw/alpaca/train-00000-of-00001-6ef3991c06080e14.parquet", target)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"{target.removeprefix('./')}: no rule makes this target" in output
    assert said in output
    assert "what to do: " in output
    assert "for those in your own file, name it: vlmflow run FILE" in output
    assert "Exception" not in output


def test_a_rule_name_as_target_is_refused_with_what_the_rule_makes(tmp_path: Path) -> None:
    done = call(tmp_path, "-n", "--", "merge_weights")
    assert done.returncode == 1
    assert (
        "merge_weights: this is a rule, not a file\n  what to do: use a file that it makes: work/qwen3vl-fire/merged, "
        in done.stderr
    )
    assert "Exception" not in done.stderr
    assert "WorkflowError" not in done.stderr


def test_without_a_target_the_runs_of_your_own_file_are_made(tmp_path: Path) -> None:
    """Other changes in the file are not runs; a file that names no run makes all of them."""
    (tmp_path / "t.json").write_text("[]")
    file = tmp_path / "mine.yaml"
    data = {"datasets": {"fire": {"train": str(tmp_path / "t.json"), "test": None}}}
    run = {"runs": {"mine": {"model": "qwen3-8b", "dataset": "fire"}}}
    shipped = {"qwen3vl-fire", "qwen3vl-fire-good", "qwen3vl-volcano", "qwen3-alpaca"}
    shipped |= {"qwen3vl-fire-general", "qwen3vl-feedback", "llama-alpaca", "qwen3-30b-alpaca"}
    for config, planned in ((data | run, {"mine"}), (data, shipped)):
        file.write_text(yaml.safe_dump(config))
        done = call(tmp_path, "-n", "--configfile", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        missing = re.findall(r"^Reason: Missing output files: merged/(.+)$", done.stdout, re.MULTILINE)
        assert set(missing) == planned


def test_a_plan_says_what_is_trained_and_from_how_many_evaluations_it_chooses(tmp_path: Path) -> None:
    """Where the data is there already; the run itself says nothing of it."""
    folder = tmp_path / "data" / "fire"
    folder.mkdir(parents=True)
    stats = some_stats(examples={"train": 300, "val": 9, "test": 0}, trained_characters={3: 1, 9: 3})
    write_account(folder / "stats.json", stats)
    done = call(tmp_path, "-n", "--", "checkpoints/qwen3vl-fire/smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    bad = "25% of the trained text is attempts scored below 8; run qwen3vl-fire-good trains the others"
    assert f"data set fire: {bad}\n" in done.stderr
    assert "run qwen3vl-fire: 5 steps, 1 evaluation: nothing to choose from\n" in done.stderr
    assert "evaluation:" not in call(tmp_path, "-n", "--", "fitted/qwen3vl-fire").stderr, "nothing is trained"


def test_more_trainers_than_cores_are_not_planned(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("runs: {qwen3vl-fire: {device: cpu, strategy: ddp, processes: 9999}}")
    more = ["--configfile", str(file)]
    done = call(tmp_path, "-n", *more, "--", "merged/qwen3vl-fire")
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "runs.qwen3vl-fire.processes: 9999 trainers on device cpu, this machine has" in output
    assert "Traceback" not in output
    assert call(tmp_path, "-n", *more, "--", "fitted/qwen3vl-fire").returncode == 0
    file.write_text("runs: {qwen3vl-fire: {device: cpu, strategy: ddp, nodes: 999, processes: 9}}")
    nodes = call(tmp_path, "-n", *more, "--", "merged/qwen3vl-fire")
    said = nodes.stdout + nodes.stderr
    assert "processes: 8991 trainers on 999 nodes on device cpu, this machine has" in said
    assert "what to do: set runs.qwen3vl-fire.nodes to " in said


def test_nodes_without_a_volume_of_their_own_are_not_planned(tmp_path: Path) -> None:
    """The pods would have no place for the launch file; with the profile of a cluster they have."""
    storage = ["--default-storage-provider", "fs", "--default-storage-prefix", str(tmp_path / "targets")]
    files = ["--configfile", str(ROOT / "profiles/kubernetes/stores.yaml")]
    target = ["--config", "runs={qwen3vl-fire: {nodes: 2}}", "--", "merged/qwen3vl-fire"]
    done = call(tmp_path, "-n", *storage, *files, *target)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "runs.qwen3vl-fire.nodes: 2 nodes need a volume that all of them see" in output
    assert "remote-job-local-storage-prefix is " in output
    assert "Traceback" not in output
    here = ["--remote-job-local-storage-prefix", "/outputs/.pods/x"]
    planned = call(tmp_path, "-n", *storage, *here, *files, *target)
    assert planned.returncode == 0, planned.stdout + planned.stderr


def test_offloading_without_a_compiler_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = call(
        tmp_path, "-n", "--config", "runs={qwen3vl-fire: {strategy: zero2_offload}}", "--", "merged/qwen3vl-fire"
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "runs.qwen3vl-fire.strategy: zero2_offload: DeepSpeed compiles its optimizer for the CPU" in output
    assert "no C++ compiler (no-such-compiler)" in output
    assert "Traceback" not in output


def test_a_temporary_folder_too_long_for_sockets_is_refused_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is on a batch system: the trainers' processes could not reach each other."""
    (folder := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    (tmp_path / "t.json").write_text("[]")
    (tmp_path / "mine.yaml").write_text("datasets: {fire: {train: t.json, test: null, image_roots: [.]}}")
    done = call(tmp_path, "-n", "--configfile", str(tmp_path / "mine.yaml"), "--", "checkpoints/qwen3vl-fire/smoke")
    assert done.returncode == 1
    assert f"TMPDIR: {folder} has more than 73 bytes" in done.stderr
    assert "export TMPDIR=/tmp" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("at_work", [True, False])
def test_a_plan_next_to_a_running_snakemake_shows_no_error(tmp_path: Path, at_work: bool) -> None:
    """Nor next to the lock of a killed Snakemake; and the plan leaves the lock alone."""
    (tmp_path / "t.json").write_text("[]")
    lock = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("converted/fire/train.jsonl\n")
    with (tmp_path / ".snakemake" / "vlmflow.lock").open("w") as held:
        if at_work:
            fcntl.flock(held, fcntl.LOCK_SH)
        more = f"datasets={{fire: {{train: {tmp_path}/t.json}}}}"
        done = call(tmp_path, "-n", "--config", more, "--", "converted/fire/train.jsonl")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Error" not in output
    assert ("Another Snakemake is running in this folder" in output) == at_work
    assert lock.exists()


@pytest.mark.parametrize("plan", [["-n"], []])
def test_missing_picture_roots_are_refused_with_the_plan(tmp_path: Path, plan: list[str]) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text("[]")
    sources = f"train: {tmp_path}/train.json, test: {tmp_path}/test.json, image_roots: [{tmp_path}/nowhere]"
    done = call(tmp_path, *plan, "--config", f"datasets={{fire: {{{sources}}}}}", "--", "data/fire/stats.json")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"datasets.fire.image_roots: no folder {tmp_path}/nowhere\n  what to do: " in output
    assert "Traceback" not in output
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(
    ("key", "value", "target", "named"),
    [
        ("datasets.fire.train", "gone/t.json", "data/fire/stats.json", "does not exist"),
        ("datasets.fire.test", "gone/e.json", "converted/fire/test.jsonl", "does not exist"),
        ("datasets.fire.fixed_rows", "gone/m.jsonl", "data/fire/stats.json", "does not exist"),
        ("datasets.fire.train", ".", "data/fire/stats.json", "is a folder"),
        ("models.qwen3-8b.source", "gone/model", "models/qwen3-8b", "no folder"),
    ],
)
def test_a_missing_local_source_is_reported_with_its_key(tmp_path: Path, key, value, target, named) -> None:
    (tmp_path / "t.json").write_text("[]")
    (tmp_path / "raw" / "fire").mkdir(parents=True)
    (tmp_path / "raw" / "fire" / "t.json").write_text("[]")  # made of an older one
    block, name, last = key.split(".")
    config = {"datasets": {"fire": {"train": "t.json", "test": None}, "alpaca": {"train": "gone/other.parquet"}}}
    config.setdefault(block, {}).setdefault(name, {})[last] = str(tmp_path / value)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    done = call(tmp_path, "-n", "--configfile", str(tmp_path / "mine.yaml"), "--", target)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search(rf"(?m)^{key}: .*{named}", output), output
    assert str(tmp_path / value) in output
    assert "what to do: " in output
    assert "Traceback" not in output
    assert "Exception" not in output


def test_a_run_with_unchecked_pictures_is_not_planned(tmp_path: Path) -> None:
    """Its data set can still be planned."""
    (tmp_path / "t.json").write_text("[]")
    file = tmp_path / "mine.yaml"
    file.write_text("datasets: {fire: {train: t.json, test: null, skip_images: true}}")
    done = call(tmp_path, "-n", "--configfile", str(file), "--", "merged/qwen3vl-fire")
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search(r"(?m)^datasets\.fire\.skip_images: true .* run qwen3vl-fire .*\n  what to do: ", output), output
    assert "Traceback" not in output
    done = call(tmp_path, "-n", "--configfile", str(file), "--", "data/fire/stats.json", "reports/data-fire.html")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_source_of_another_data_set_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[]")
    more = "datasets={fire: {train: t.json}, alpaca: {train: gone/other.parquet}}"
    done = call(tmp_path, "-n", "--config", more, "--", "converted/fire/train.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr


def test_values_of_the_command_line_override_files(tmp_path: Path) -> None:
    changed = "runs={qwen3vl-fire: {train: {learning_rate: 1e-5}}}"
    assert call(tmp_path, "-n", "--config", changed, "--", "merged/qwen3vl-fire").returncode == 0
    wrong = call(tmp_path, "-n", "--config", "runs={qwen3vl-fire: {gpus: 4}}", "--", "merged/qwen3vl-fire")
    assert "--config: runs.qwen3vl-fire.gpus: unknown key" in wrong.stdout + wrong.stderr


def test_a_run_without_its_gpus_stops_before_the_first_job(tmp_path: Path) -> None:
    """The run requests 99 GPUs, because a machine with four would pass."""
    more = "runs={qwen3vl-fire: {processes: 99}}"
    done = call(tmp_path, "--config", more, "--", "merged/qwen3vl-fire")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "needs 99 GPUs, this machine has" in output
    assert "runs.qwen3vl-fire.device: cpu" in output
    assert "--executor kubernetes" in output
    assert not (tmp_path / "raw").exists()


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    more = "datasets={fire: {train: nowhere/FIRE-train-100K.json}}"
    done = call(tmp_path, "--config", more, "--", "raw/fire/FIRE-train-100K.json")
    assert done.returncode != 0
    assert "nowhere/FIRE-train-100K.json" in done.stdout + done.stderr


def test_a_model_without_a_revision_is_named_before_the_first_job(tmp_path: Path) -> None:
    more = "models={new: {source: 'hf://owner/not-pinned', model_type: qwen3_vl}}"
    assert call(tmp_path, "--config", more, "-n", "--", "models/new").returncode == 0
    done = call(tmp_path, "--config", more, "--", "models/new")
    assert done.returncode != 0
    assert "models.new.source: hf://owner/not-pinned has no revision in pins.yaml" in done.stdout + done.stderr
    assert not (tmp_path / "logs").exists()


TWO_JOBS = f"""
import sys
sys.path.insert(0, "{ROOT}/scripts")
from vlmflow.harness import patches
from vlmflow.harness.plan import share_gpus
rule all:
    input: "one", "two"
rule train:
    output: "{{job}}"
    params: other=lambda wildcards: {{"one": "two", "two": "one"}}[wildcards.job]
    resources: gpu=2
    shell:
        "date +%s.%N > {{output}}; "
        "for try in $(seq {{config[tries]}}); do if [ -s {{params.other}} ]; then break; fi; sleep 0.1; done; "
        "date +%s.%N >> {{output}}"
def plan_and_share(plan):
    plan()
    share_gpus(workflow, None)
patches.around_planning(workflow, plan_and_share)
"""
"""Each job waits some time for the other one to begin."""


@pytest.mark.parametrize(("gpus", "together"), [(2, False), (4, True)])
def test_runs_wait_for_each_others_gpus(tmp_path: Path, gpus: int, together: bool) -> None:
    """Snakemake itself would start both at once on the same GPUs; the driver's list replaces real cards."""
    (tmp_path / "Snakefile").write_text(TWO_JOBS)
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {number}: a card'\n" for number in range(gpus)))
    driver.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "4", "--config", f"tries={600 if together else 15}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": f"{driver.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    times = [list(map(float, (tmp_path / job).read_text().split())) for job in ("one", "two")]
    (_, first_end), (second_begin, _) = sorted(times)
    assert (second_begin < first_end) == together
