"""What an evaluation keeps: measured losses, and the log of looks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_checks, some_evaluation
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation import measure
from vlmflow.evaluation.answer_losses import Measured
from vlmflow.evaluation.measure import Measurement, ScoredModel
from vlmflow.evaluation.report import LOG, EvaluatedModel, KeptLines, Loss, read_looks, record_look
from vlmflow.evaluation.verdict import read_evaluations, refuse_unless_shown
from vlmflow.merging.proof import Proof, ProvenFile, proven_digest
from workflow_runs import ROOT


def measured(key: str) -> Measured:
    return Measured(key, {"own right": Loss(1.5, 3)}, {"own right": "ab"}, {"own right": "cd"}, 9)


def losses_in(store: Path, meaning: dict[str, Any]) -> KeptLines[Measured]:
    return KeptLines(store, "losses", meaning, Measured)


def test_losses_are_kept_by_model_and_cut_lines_are_left_out(tmp_path: Path) -> None:
    store = losses_in(tmp_path, {"model": "a", "dtype": "float32"})
    assert store.read() == {}
    lines = [msgspec.json.encode(measured(key)) for key in ("one", "two", "three")]
    store.new_file().write_bytes(lines[0] + b"\n" + lines[1][:20])
    store.new_file().write_bytes(lines[2] + b"\n" + lines[1])
    assert store.read() == {"one": measured("one"), "three": measured("three")}
    assert losses_in(tmp_path, {"dtype": "float32", "model": "a"}).read().keys() == {"one", "three"}
    assert losses_in(tmp_path, {"model": "b", "dtype": "float32"}).read() == {}


def test_losses_of_another_way_of_measuring_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = Measurement("qwen3", {}, "last_round", tmp_path, 64, 512, "cpu", "float32", 1, 1)
    model = ScoredModel("it", tmp_path, "digest")
    losses_in(tmp_path, how.meaning(model)).new_file().write_bytes(msgspec.json.encode(measured("one")) + b"\n")
    assert losses_in(tmp_path, how.meaning(model)).read().keys() == {"one"}
    monkeypatch.setattr(measure, "MEASURING", measure.MEASURING + 1)
    assert losses_in(tmp_path, how.meaning(model)).read() == {}


def test_every_look_at_test_is_counted(tmp_path: Path) -> None:
    assert read_looks(tmp_path) == []
    assert [record_look(tmp_path, "evaluate", run, "fire", "rows-1", "m") for run in ("a", "a", "b")] == [1, 2, 3]
    assert record_look(tmp_path, "evaluate", "a", "fire", "rows-2", "m") == 1
    with (tmp_path / LOG).open("ab") as log:
        log.write(b'{"time": "\xff"}\n{"time": "2026')
    assert record_look(tmp_path, "answer", "c", "fire", "rows-1", "m") == 4
    assert [look.run for look in read_looks(tmp_path)] == ["a", "a", "b", "a", "c"]


def test_looks_of_several_writers_are_all_counted(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "from vlmflow.evaluation.report import record_look\n"
        "for _ in range(50): record_look(Path(sys.argv[1]), 'evaluate', 'a', 'd', 'r', 'm')"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "scripts")]
    writers = [subprocess.Popen(words) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert record_look(tmp_path, "evaluate", "a", "d", "r", "m") == 151


def test_weights_that_fall_short_are_refused_with_the_figures() -> None:
    """What falls short: `test_margins.py`."""
    few = {"val": some_evaluation(verdict="too few rows", sentence="Too few rows for a verdict.")}
    refuse_unless_shown(few, None)
    refuse_unless_shown({"val": some_evaluation()}, "learned")
    with pytest.raises(VlmflowError, match=r"require: learned, but the verdict is 'too few rows'\. Too few"):
        refuse_unless_shown(few, "learned")
    with pytest.raises(VlmflowError, match="require: not_worse, but it costs first answers"):
        refuse_unless_shown({"val": some_evaluation(costs_first_answers=True)}, "not_worse")
    with pytest.raises(VlmflowError, match="add val to"):
        refuse_unless_shown({"test": some_evaluation(split="test")}, "learned")


def test_an_evaluation_of_other_weights_is_refused(tmp_path: Path) -> None:
    proof = Proof(some_checks(), {"model.safetensors": ProvenFile(3, "ab")}, None, {})
    ours = some_evaluation(tuned=EvaluatedModel(proven_digest(proof)))
    folder = tmp_path / "val"
    write_account(folder / "report.json", ours)
    assert read_evaluations([folder], proof) == {"val": ours}
    write_account(folder / "report.json", some_evaluation())
    with pytest.raises(VlmflowError, match="it evaluated other weights than those in verified/mine"):
        read_evaluations([folder], proof)
