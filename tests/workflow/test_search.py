"""A search of the demo's run, for real: its own settings and four trials in two rounds; killed, and called again."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml

from cluster.shell import wait_for
from forked_snakemake import called
from trainer_faults import before_trainers
from vlmflow.core.account import read_account
from vlmflow.search.study import Asked, Judged, TrialResult
from warm_programs import fresh
from workflow_runs import RUN, STEPS, command, copy_folder, snakemake

QUICK, LONG = 1, 32
"""Batches of a step: a trial with many has no time to reach its last step."""

WAIT = f"""
import sys
if "vlmflow.in_trainer.process" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    if sys.orig_argv[sys.orig_argv.index("--gradient_accumulation_steps") + 1] == "{LONG}":
        import time
        from transformers import Trainer

        train = Trainer.training_step

        def training_step(self, *args, **kwargs):
            time.sleep(0.5)
            return train(self, *args, **kwargs)

        Trainer.training_step = training_step
"""
"""A batch of a long trial waits, so that the cores are free for others until its hours are over."""

SEARCH = {
    "run": RUN,
    "space": {"learning_rate": [0.008, 1e37], "gradient_accumulation_steps": [QUICK, LONG]},
    "rounds": 2,
    "together": 2,
    "seed": 12,
}
"""All four combinations are asked: with this seed the quick ones first, of which one explodes. The run's own settings,
which are trial 0, are outside of this space, and quick."""

RANKS, FIRST = 2, 3
"""The trainers of a trial, and the trials of the first round."""

TARGETS = ["--", "search/rates/best.yaml", "reports/search-rates.html"]
TRIALS = [(number, slot) for number in range(2) for slot in range(FIRST - number)]


def budget(folder: Path) -> float:
    """Return the GPU-hours of the search: a quick trial may take three times as long as the same training took here.

    A long one would take some twenty times as long, and has at most three times, too.
    """
    lines = (folder / "benchmarks" / "train_model" / f"{RUN}.tsv").read_text().splitlines()
    seconds = float(lines[1].split("\t")[0])
    return 3 * seconds * FIRST * RANKS / 3600


def words(folder: Path) -> list[str]:
    search = {"rates": SEARCH | {"limits": {"gpu_hours": budget(folder)}}}
    return ["--config", f"search={json.dumps(search)}"]


@pytest.fixture(scope="module")
def searched(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's folder with a search, killed in its second trial and called again."""
    folder = copy_folder(demo_run, tmp_path_factory.mktemp("searched") / "demo")
    gate = folder / "checkpoints" / RUN / "smoke" / "gate.json"
    measured = json.loads(gate.read_text())
    measured["full_run"]["seconds"] = 1  # beside other tests it may have been so slow that the budget is refused
    gate.write_text(json.dumps(measured))
    # The val of this sample is too small to recommend a trial, which is refused; a larger one would take minutes.
    refused = called(command(folder, *words(folder), *TARGETS))
    assert "it could never recommend a trial" in refused.stdout + refused.stderr
    choice = folder / "chosen" / RUN / "val" / "account.json"
    choice.write_text(json.dumps(json.loads(choice.read_text()) | {"all_groups": 100}))
    with fresh(), (folder / "killed.txt").open("wb") as said:
        first = subprocess.Popen(command(folder, *words(folder), *TARGETS), stdout=said, stderr=subprocess.STDOUT)
    results = [folder / "search" / "rates" / "0" / "0" / f"{slot}.json" for slot in range(FIRST)]
    one_is_done = lambda: any(file.is_file() for file in results)  # noqa: E731
    # Only when the next one has begun, Snakemake has recorded that the one before is whole.
    logs = folder / "logs" / "trial"
    wait_for(
        "a trial has ended",
        lambda: (one_is_done() and len([*logs.glob("*.log")]) > 1) or first.poll() is not None,
        300,
        pause=0.05,
    )
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []
    (folder / "first.json").write_text(json.dumps([str(file) for file in results if file.is_file()]))
    with pytest.MonkeyPatch.context() as patch:
        before_trainers(folder, WAIT, patch)
        (folder / "again.txt").write_text(snakemake(folder, *words(folder), *TARGETS))
    return folder


def result(folder: Path, number: int, slot: int) -> TrialResult:
    return read_account(folder / "search" / "rates" / str(number) / "0" / f"{slot}.json", TrialResult)


def test_no_finished_trial_runs_again(searched: Path) -> None:
    (done,) = json.loads((searched / "first.json").read_text())
    slot = Path(done).stem
    said = (searched / "again.txt").read_text()
    assert f"round 0, rung 0, slot {slot}" not in said
    assert "rule train_smoke" not in said


def test_one_fails_the_budget_stops_one_and_the_best_of_the_others_is_compared_with_the_own_settings(
    searched: Path,
) -> None:
    results = [result(searched, *one) for one in TRIALS]
    said = [(one.settings, one.state, one.reason, one.hours) for one in results]
    assert len({one.number for one in results}) == len(TRIALS)
    states = {(one.settings["learning_rate"], one.settings["gradient_accumulation_steps"]): one for one in results}
    assert (results[0].number, results[0].state, results[0].settings["learning_rate"]) == (0, "done", 0.01), said
    assert states[0.008, QUICK].state == "done", said
    assert states[1e37, QUICK].state == "failed", said
    stopped = states[0.008, LONG]
    assert stopped.state == "stopped", said
    assert "hours are over" in str(stopped.reason)
    assert stopped.steps < STEPS, said
    # The trials of the second round share what the first has left, and each ends with the step in which its hours end.
    left = budget(searched) - sum(one.gpu_hours for one in results[:FIRST])
    asked = [trial for trial in read_account(searched / "search/rates/1/0/asked.json", Asked).trials if trial]
    assert sum(trial.hours * RANKS for trial in asked) == pytest.approx(left), said
    later = [(one, trial) for one, trial in zip(results[FIRST:], asked, strict=True) if one.state == "stopped"]
    assert all(one.hours >= trial.hours for one, trial in later), said
    judged = read_account(searched / "search" / "rates" / "judged.json", Judged)
    own, other = results[0], states[0.008, QUICK]
    assert own.value is not None
    assert other.value is not None
    assert judged.best == (other.number if other.value < own.value else own.number), said
    assert (judged.compared is None) == (judged.best == 0), "the best trial is compared with trial 0"
    assert judged.chosen in (0, judged.best)
    best = yaml.safe_load((searched / "search" / "rates" / "best.yaml").read_text())
    assert best["runs"][RUN]["train"] == (own if judged.chosen == 0 else other).settings
    probably = yaml.safe_load((searched / "search" / "rates" / "probably.yaml").read_text())
    assert probably["runs"][RUN]["train"] == (own if judged.probably == 0 else other).settings
    page = (searched / "reports" / "search-rates.html").read_text()
    assert judged.sentence.partition("'")[0] in page  # the page escapes the rest
    assert "1e+37" in page
    assert "hours are over" in page


def test_nothing_is_left_to_do(searched: Path) -> None:
    assert "Nothing to be done" in snakemake(searched, *words(searched), *TARGETS)


def test_a_deleted_result_is_made_again_and_the_same_trials_are_asked(searched: Path) -> None:
    file = searched / "search" / "rates" / "0" / "0" / "0.json"
    before = file.read_bytes()
    asked = [searched / "search" / "rates" / str(number) / "0" / "asked.json" for number in range(2)]
    trials = [[trial and trial.settings for trial in read_account(each, Asked).trials] for each in asked]
    file.unlink()
    said = snakemake(searched, *words(searched), *TARGETS)
    assert "round 0, rung 0, slot 0" in said
    assert file.read_bytes() == before, "its training is kept"
    assert [[trial and trial.settings for trial in read_account(each, Asked).trials] for each in asked] == trials
    assert [result(searched, *one).state for one in TRIALS].count("done") == 2
    assert "Nothing to be done" in snakemake(searched, *words(searched), *TARGETS)


def test_the_run_takes_the_best_settings(searched: Path) -> None:
    call = command(searched, "-n", f"checkpoints/{RUN}/full")
    call[call.index("--cores") : call.index("--cores")] = [str(searched / "search" / "rates" / "best.yaml")]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    judged = read_account(searched / "search" / "rates" / "judged.json", Judged)
    assert ("train_model" in done.stdout + done.stderr) == (judged.chosen != 0), "its own are trained"
    assert "propose" not in done.stdout + done.stderr
