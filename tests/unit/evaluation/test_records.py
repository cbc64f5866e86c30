"""What an evaluation keeps: intervals' seeds, measured losses, and the log of looks."""

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from made_accounts import some_checks, some_evaluation, some_figures
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation import measure
from vlmflow.evaluation.accounts import EvaluatedModel, EvaluationReport, Interval, Loss
from vlmflow.evaluation.answer_losses import Measured
from vlmflow.evaluation.bootstrap import FEWEST_GROUPS, interval
from vlmflow.evaluation.looks import LOG, read_looks, record_look
from vlmflow.evaluation.measure import Measurement, ScoredModel
from vlmflow.evaluation.results import read_evaluations, refuse_unless_shown
from vlmflow.evaluation.store import LossStore
from vlmflow.merging.proof import Proof, ProvenFile, proven_digest
from workflow_runs import ROOT


def test_the_interval_covers_the_true_mean_about_95_times_of_100() -> None:
    """Each group has a level of its own, so its rows are alike: the interval must come from groups."""
    covered = 0
    for trial in range(60):
        draws = np.random.default_rng(trial)
        levels = draws.normal(0, 1, 60)
        groups = [str(n) for n in range(60) for _ in range(1 + n % 5)]
        values = [levels[int(name)] + draws.normal(0, 0.2) for name in groups]
        found = interval(values, groups, 1)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert covered >= 52


def test_an_interval_depends_on_seed_and_groups_alone() -> None:
    values, groups = [random.Random(n).random() for n in range(40)], [str(n % 25) for n in range(40)]
    assert interval(values, groups, 3) == interval(values, groups, 3)
    assert interval(values, groups, 3) != interval(values, groups, 4)
    assert interval(values[::-1], groups[::-1], 3).mean == pytest.approx(interval(values, groups, 3).mean)


def test_few_groups_have_no_interval() -> None:
    names = [str(n % (FEWEST_GROUPS - 1)) for n in range(500)]
    assert interval([1.0] * 500, names, 1) == Interval(1.0, None, None)
    assert not Interval(-1.0, None, None).below_zero


def measured(key: str) -> Measured:
    return Measured(key, {"history": Loss(1.5, 3)}, {"history": "ab"}, {"history": "cd"}, 9)


def test_losses_are_kept_by_model_and_cut_lines_are_left_out(tmp_path: Path) -> None:
    store = LossStore(tmp_path, {"model": "a", "dtype": "float32"})
    assert store.read() == {}
    lines = [msgspec.json.encode(measured(key)) for key in ("one", "two", "three")]
    store.new_file().write_bytes(lines[0] + b"\n" + lines[1][:20])
    store.new_file().write_bytes(lines[2] + b"\n" + lines[1])
    assert store.read() == {"one": measured("one"), "three": measured("three")}
    assert LossStore(tmp_path, {"dtype": "float32", "model": "a"}).read().keys() == {"one", "three"}
    assert LossStore(tmp_path, {"model": "b", "dtype": "float32"}).read() == {}


def test_losses_of_another_way_of_measuring_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = Measurement("qwen3", {}, "last_round", tmp_path, 64, 512, "cpu", "float32", 1, 1)
    model = ScoredModel("it", tmp_path, "digest")
    LossStore(tmp_path, how.meaning(model)).new_file().write_bytes(msgspec.json.encode(measured("one")) + b"\n")
    assert LossStore(tmp_path, how.meaning(model)).read().keys() == {"one"}
    monkeypatch.setattr(measure, "MEASURING", measure.MEASURING + 1)
    assert LossStore(tmp_path, how.meaning(model)).read() == {}


def test_every_look_at_test_is_counted(tmp_path: Path) -> None:
    assert read_looks(tmp_path) == []
    assert [record_look(tmp_path, "evaluate", run, "fire", "rows-1", "m") for run in ("a", "a", "b")] == [1, 2, 3]
    assert record_look(tmp_path, "evaluate", "a", "fire", "rows-2", "m") == 1
    with (tmp_path / LOG).open("ab") as log:
        log.write(b'{"time": "2026')
    assert record_look(tmp_path, "answer", "c", "fire", "rows-1", "m") == 4
    assert [look.run for look in read_looks(tmp_path)] == ["a", "a", "b", "a", "c"]


def test_looks_of_several_writers_are_all_counted(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "from vlmflow.evaluation.looks import record_look\n"
        "for _ in range(50): record_look(Path(sys.argv[1]), 'evaluate', 'a', 'd', 'r', 'm')"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "scripts")]
    writers = [subprocess.Popen(words) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert record_look(tmp_path, "evaluate", "a", "d", "r", "m") == 151


def test_what_val_must_show() -> None:
    for verdict, passes in {
        "learned": {"learned", "uses_feedback", "not_worse"},
        "used already": {"uses_feedback", "not_worse"},
        "not shown": {"not_worse"},
        "worse": set(),
    }.items():
        of_val = {"val": some_evaluation(verdict=verdict)}
        refuse_unless_shown(of_val, None)
        for require in ("learned", "uses_feedback", "not_worse"):
            if require in passes:
                refuse_unless_shown(of_val, require)
                continue
            with pytest.raises(
                VlmflowError, match=f"verdict '{verdict}'; runs.NAME.evaluate.require: {require} accepts"
            ):
                refuse_unless_shown(of_val, require)
    with pytest.raises(VlmflowError, match="add val to"):
        refuse_unless_shown({"test": some_evaluation(split="test")}, "learned")


@pytest.mark.parametrize(
    ("name", "said"), [("first", "the loss of the first answer rose"), ("history", "the loss of the last answer with")]
)
def test_a_shown_rise_of_a_loss_is_worse(name: str, said: str) -> None:
    """Whatever the use of feedback; a rise that is not shown is none."""

    def of_val(low: float | None) -> dict[str, EvaluationReport]:
        difference = some_figures().difference | {name: Interval(0.3, low, 0.5)}
        return {"val": some_evaluation(all=some_figures(difference=difference))}

    refuse_unless_shown(of_val(0.1), "learned")
    for not_shown in (-0.1, None):
        refuse_unless_shown(of_val(not_shown), "not_worse")
    with pytest.raises(VlmflowError, match=rf"not_worse accepts no shown decline, but {said}.*: \+0\.300 \[\+0\.100, "):
        refuse_unless_shown(of_val(0.1), "not_worse")


def test_a_lost_answer_to_the_question_alone_is_no_decline() -> None:
    """It speaks of feedback that is not there."""
    difference = dict.fromkeys(("question", "placebo"), Interval(0.3, 0.1, 0.5))
    all_rows = some_figures(difference=some_figures().difference | difference)
    refuse_unless_shown({"val": some_evaluation(all=all_rows)}, "not_worse")


def test_an_evaluation_of_other_weights_is_refused(tmp_path: Path) -> None:
    proof = Proof(some_checks(), {"model.safetensors": ProvenFile(3, "ab")}, None, {})
    ours = some_evaluation(tuned=EvaluatedModel(proven_digest(proof)))
    folder = tmp_path / "val"
    write_account(folder / "report.json", ours)
    assert read_evaluations([folder], proof) == {"val": ours}
    write_account(folder / "report.json", some_evaluation())
    with pytest.raises(VlmflowError, match="it evaluated other weights than those in verified/mine"):
        read_evaluations([folder], proof)
