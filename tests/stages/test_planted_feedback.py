"""Two trainings by the workflow's own trainer; the evaluation tells the one that could learn from feedback.

The losses of an answer are per token; it has two, the code and the end.
"""

import json
import math
from pathlib import Path

import pytest

import trial
from planted_feedback import CODES, ROWS, RUNS, TRAIN
from vlmflow.config.run_blocks import TrainBlock
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.account import read_account, write_account
from vlmflow.evaluation.accounts import HISTORY, PLACEBO, QUESTION, EvaluationReport
from vlmflow.evaluation.verdict import LEARNED, NOT_SHOWN
from vlmflow.rows.data_rows import Row, lines_of
from vlmflow.search.accounts import Asked, AskedTrial, TrialResult
from workflow_runs import copy_folder

CHANCE = math.log(len(CODES)) / 2
"""The loss per token of a guess between all codes."""


def evaluation(folder: Path, run: str) -> EvaluationReport:
    report = read_account(folder / "eval" / run / "val" / "report.json", EvaluationReport)
    assert (report.rows, report.left_out) == (ROWS["val"], {})
    print(report.sentence, json.dumps(report.all.tuned))
    return report


def test_a_run_on_real_feedback_learns_to_use_it(planted_runs: Path) -> None:
    report = evaluation(planted_runs, "real")
    assert report.verdict == LEARNED
    assert report.all.tuned_uses.mean <= -1
    assert report.all.tuned[HISTORY] < 0.15
    assert report.all.tuned[QUESTION] > CHANCE - 0.1


def test_a_run_on_shuffled_feedback_does_not(planted_runs: Path) -> None:
    """It learned that a code comes last, and nothing about which: its loss is that of a guess."""
    report = evaluation(planted_runs, "shuffled")
    assert report.verdict == NOT_SHOWN
    assert abs(report.all.tuned_uses.mean) <= 0.1
    for given in (HISTORY, PLACEBO):
        assert report.all.tuned[given] == pytest.approx(CHANCE, abs=0.1)
        assert report.all.base[given] > report.all.tuned[given] + 1


@pytest.mark.parametrize("split", ROWS)
def test_the_runs_differ_in_the_code_in_the_feedback_alone(planted_runs: Path, split: str) -> None:
    real, shuffled = (list(lines_of(planted_runs / "data" / run / f"{split}.jsonl", Row)) for run in RUNS)
    assert len(real) == len(shuffled) == ROWS[split]
    dealt_its_own = 0
    for row, other in zip(real, shuffled, strict=True):
        question, wrong, feedback, right = (turn.value for turn in row.conversations)
        assert right in CODES
        assert feedback.split().count(right) == 1
        assert right not in f"{question} {wrong}".split()
        held = other.conversations[2].value.split("\n")[1]
        expected = [question, wrong, feedback.replace(f"\n{right}\n", f"\n{held}\n"), right]
        assert [turn.value for turn in other.conversations] == expected
        dealt_its_own += held == right
    assert dealt_its_own / len(real) < 0.1


@pytest.fixture
def trials(planted_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, whose finished trainings are those of trials."""
    folder = copy_folder(planted_runs, tmp_path / "trials")
    for run in RUNS:
        (folder / "stores" / "runs" / run / "full").rename(folder / "stores" / "runs" / run / "search")
    monkeypatch.chdir(folder)
    return folder


def judged(run: str, objective: str) -> TrialResult:
    """Return the result of a trial with a run's own settings."""
    here = Path("search", objective, "0", "0")
    asked = AskedTrial(number=0, settings={}, steps=TRAIN["max_steps"], hours=None)
    write_account(here / "asked.json", Asked(search=objective, round=0, rung=0, trials=[asked]))
    trial.main(
        asked=here / "asked.json",
        rows=Path("fitted", run),
        model=Path("models", "planted"),
        smoke=Path("checkpoints", run, "smoke"),
        cached=[],
        result=here / "0.json",
        settings=TrainBlock(
            model_type="qwen3",
            train=TrainSettings(**TRAIN),
            device="cpu",
            nodes=1,
            processes=1,
            strategy="ddp",
            deepspeed=None,
            tuner="full",
        ),
        objective=trial.JudgeBlock(objective=objective, rows=1_000, feedback=True),
        picture_store=Path("stores", "pictures"),
        run_store=Path("stores", "runs"),
        evaluation_store=Path("stores", "evaluations"),
        stats=[Path("data", run, "stats.json")],
        val=[Path("data", run, "val.jsonl")],
        threads=2,
    )
    return read_account(here / "0.json", TrialResult)


def test_a_search_judges_its_trials_as_the_evaluation_does(trials: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vlmflow"):
        found = {objective: judged("real", objective) for objective in ("uses_feedback", "learned")}
    assert caplog.text.count("already trained to step") == len(found), "nothing is trained again"
    expected = evaluation(trials, "real").all
    for objective, figure in (("uses_feedback", expected.tuned_uses), ("learned", expected.learned)):
        assert found[objective].state == "done"
        assert found[objective].value == pytest.approx(figure.mean, abs=1e-4)
        assert found[objective].hours > 0, "the evaluation counts"
    (folder,) = (trials / "stores" / "runs" / "real" / "search").iterdir()
    assert not (folder / "judged").exists(), "the merged weights go"
