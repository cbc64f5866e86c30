"""The evaluation on models of known behaviour, what it refuses, and what it keeps: losses, and the log of looks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_checks, some_evaluation
from made_rows import made_row
from simulated_evaluations import (
    ROWS,
    Judge,
    choose_rows,
    ignores,
    noise,
    reacts_to_presence,
    rows,
    scorer,
    unlike,
    uses,
)
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation import measure
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.chosen_split import counts_of
from vlmflow.evaluation.margins import margin_figures, margin_report
from vlmflow.evaluation.measure import ChosenRow, Measurement, ScoredModel, evaluated_rows
from vlmflow.evaluation.report import (
    LOG,
    OTHERS,
    OWN,
    QUESTION,
    EvaluatedModel,
    EvaluatedRow,
    KeptLines,
    LeftOut,
    Loss,
    read_looks,
    record_look,
)
from vlmflow.evaluation.verdict import (
    LEARNED,
    NO_GAIN,
    TOO_FEW,
    TOO_FEW_WITHOUT_ECHO,
    WORSE,
    judge,
    read_evaluations,
    refuse_unless_shown,
)
from vlmflow.merging.proof import Proof, ProvenFile, proven_digest
from vlmflow.rows.sharegpt import ShareGptRow
from workflow_runs import ROOT


def chosen(
    of: list[ShareGptRow] | None = None, feedback: bool = True, **settings: int
) -> tuple[list[ChosenRow], list[LeftOut]]:
    return choose_rows(of or rows(), feedback=feedback, **settings)


def compared(base: Judge, tuned: Judge) -> list[EvaluatedRow]:
    found, too_long = evaluated_rows(chosen()[0], scorer(unlike(base, 1)), scorer(unlike(tuned, 2)))
    assert too_long == []
    return found


@pytest.mark.parametrize(
    ("base", "tuned", "verdict"),
    [
        (ignores, uses, TOO_FEW_WITHOUT_ECHO),
        (ignores, ignores, TOO_FEW_WITHOUT_ECHO),
        (ignores, reacts_to_presence, TOO_FEW_WITHOUT_ECHO),
        (uses, uses, TOO_FEW),
        (uses, ignores, WORSE),
    ],
)
def test_models_of_known_behaviour_get_their_verdicts(base: Judge, tuned: Judge, verdict: str) -> None:
    found = judge(margin_report(compared(base, tuned)))
    assert (found.name, found.costs_first_answers) == (verdict, False)
    assert "With another row's feedback as a control" in found.sentence


def test_only_the_content_of_feedback_counts() -> None:
    """A model that answers better after any feedback makes right and wrong answers likelier."""
    figures = margin_figures(compared(ignores, reacts_to_presence))
    assert figures.losses[OWN].difference.mean == pytest.approx(-1, abs=0.02)
    assert figures.uses_feedback is not None
    assert figures.uses_feedback.tuned.mean == pytest.approx(0.5, abs=0.15)


def test_the_figures_are_those_of_the_scorers() -> None:
    figures = margin_figures(compared(ignores, uses))
    assert (figures.rows, figures.groups) == (ROWS, ROWS)
    assert figures.uses_feedback is not None
    assert figures.right_with_feedback is not None
    assert figures.right_first is not None
    assert figures.uses_feedback.tuned.mean == figures.right_with_feedback.tuned.mean == 1
    assert figures.right_first.tuned.mean == pytest.approx(0.5, abs=0.15)
    assert figures.losses[OWN].difference.mean == pytest.approx(-2, abs=0.02)
    assert figures.losses[OTHERS[0]].difference.mean == pytest.approx(0, abs=0.02)
    assert figures.sees is None, "these rows have no pictures"


def test_of_equal_answers_none_is_preferred() -> None:
    found, _ = evaluated_rows(chosen()[0], scorer(ignores), scorer(uses))
    figures = margin_figures(found)
    assert figures.right_first is not None
    assert figures.right_first.base.mean == 0.5


def test_without_feedback_the_loss_of_the_answers_decides() -> None:
    def constant(loss: float, spread: int) -> Judge:
        return lambda feedback, answer, number: loss + noise(spread * number)

    for base, tuned, verdict in ((3, 2, LEARNED), (2, 3, WORSE), (2, 2, NO_GAIN)):
        of, out = chosen(feedback=False)
        assert out == []
        found, _ = evaluated_rows(of, scorer(constant(base, 1)), scorer(constant(tuned, 2)))
        assert {(row.right, row.wrong, *row.base) for row in found} == {(None, None, QUESTION)}
        figures = margin_report(found)
        assert judge(figures).name == verdict
        assert figures.all.uses_feedback is None


def test_every_row_is_evaluated_or_left_out_with_a_reason() -> None:
    some = rows(20)
    some.append(made_row("val-no", some[0].conversations[:2], "codes", [], [3]))
    some.append(msgspec.structs.replace(some[3], id="val-alone", source="other"))
    some += [msgspec.structs.replace(some[n], id=f"val-{n}", scores=scores) for n, scores in ((4, [3, 7]), (5, [6, 9]))]
    same = some[6].conversations
    some.append(msgspec.structs.replace(some[6], id="val-same", conversations=[same[0], same[3], *same[2:]]))
    of, out = chosen(some, count=12)
    assert counts_of(out) == {"no_donor": 1, "no_feedback": 1, "no_right": 1, "no_wrong": 2, "not_drawn": 8}
    assert sorted([row.case.row.id for row in of] + [row.id for row in out]) == sorted(row.id for row in some)
    reason = next(row.detail for row in out if row.reason == "no_donor")
    assert reason.startswith("no other row of source other with 1 turns of feedback and scores 3, 10 is left that")


def test_over_long_rows_are_out_for_both_models() -> None:
    def too_long(work: list[Work]) -> dict[str, Measured]:
        found = dict(scorer(ignores)(work))
        first = work[0].key
        found[first] = Measured(first, {}, found[first].inputs, {}, 600)
        return found

    of, _ = chosen()
    found, out = evaluated_rows(of, too_long, too_long)
    assert len(found) == ROWS - 1
    assert out == [LeftOut(of[0].case.row.id, "over_long", "600 tokens, more than train.max_length")]


def test_other_tokens_for_the_tuned_model_are_refused() -> None:
    def other(work: list[Work]) -> dict[str, Measured]:
        return {
            key: msgspec.structs.replace(each, inputs={"own right": "x"}) for key, each in scorer(uses)(work).items()
        }

    of, _ = chosen()
    with pytest.raises(VlmflowError, match="the base and the tuned model get different tokens"):
        evaluated_rows(of, scorer(uses), other)


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("answer", ["right", "wrong"])
def test_an_answer_of_other_tokens_in_another_context_is_refused(number: int, answer: str) -> None:
    """Also if there are as many."""

    def other(work: list[Work]) -> dict[str, Measured]:
        found = dict(scorer(uses)(work))
        for each in found.values():
            name = f"{OTHERS[0]} {answer}"
            each.losses[name] = msgspec.structs.replace(each.losses[name], tokens=number)
            each.answers[name] = "others"
        return found

    of, _ = chosen()
    with pytest.raises(VlmflowError, match="different tokens in different contexts"):
        evaluated_rows(of, other, other)


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


def test_an_evaluation_of_other_weights_is_refused(tmp_path: Path) -> None:
    proof = Proof(some_checks(), {"model.safetensors": ProvenFile(3, "ab")}, None, {})
    ours = some_evaluation(tuned=EvaluatedModel(proven_digest(proof)))
    folder = tmp_path / "val"
    write_account(folder / "report.json", ours)
    assert read_evaluations([folder], proof) == {"val": ours}
    write_account(folder / "report.json", some_evaluation())
    with pytest.raises(VlmflowError, match="it evaluated other weights than those in verified/mine"):
        read_evaluations([folder], proof)
