"""The evaluation on models of known behaviour, and what it refuses."""

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from made_cases import Judge, ignores, noise, reacts_to_presence, rows, scorer, uses
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import FIRST, HISTORY, PLACEBO, QUESTION, EvaluatedRow, LeftOut
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.evaluate import ChosenRow, choose_rows, counts_of, evaluated_rows
from vlmflow.evaluation.figures import figures_by_source, figures_of
from vlmflow.evaluation.verdict import LEARNED, NOT_SHOWN, USED_ALREADY, WORSE, sentence_of, verdict_of
from vlmflow.rows.data_rows import Row


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def chosen(
    of: list[Row] | None = None, feedback: bool = True, **settings: int
) -> tuple[list[ChosenRow], list[LeftOut]]:
    values = {"count": 1000, "seed": 1} | settings
    return choose_rows(of or rows(), {}, words(), {}, feedback=feedback, last_answer_only=False, key="k", **values)


def compared(base: Judge, tuned: Judge) -> list[EvaluatedRow]:
    found, too_long = evaluated_rows(chosen()[0], scorer(base), scorer(tuned))
    assert too_long == []
    return found


@pytest.mark.parametrize(
    ("base", "tuned", "verdict"),
    [
        (ignores, uses, LEARNED),
        (ignores, ignores, NOT_SHOWN),
        (ignores, reacts_to_presence, NOT_SHOWN),
        (uses, uses, USED_ALREADY),
        (uses, ignores, WORSE),
    ],
)
def test_models_of_known_behaviour_get_their_verdicts(base: Judge, tuned: Judge, verdict: str) -> None:
    figures = figures_of(compared(base, tuned), seed=1)
    assert verdict_of(figures) == verdict
    assert sentence_of(verdict, figures).startswith(
        {
            LEARNED: "The tuned model uses feedback, and learned to: ",
            NOT_SHOWN: "It is not shown that the tuned model learned to use feedback: ",
            USED_ALREADY: "The tuned model uses feedback, but its base does so too: ",
            WORSE: "The tuned model uses feedback less than its base: ",
        }[verdict]
    )


def test_only_the_placebo_tells_use_from_presence() -> None:
    figures = figures_of(compared(ignores, reacts_to_presence), seed=1)
    assert figures.difference[HISTORY].below_zero
    assert figures.tuned[HISTORY] - figures.tuned[QUESTION] == pytest.approx(-1)
    assert figures.tuned_uses is not None
    assert figures.tuned_uses.mean == pytest.approx(0)


def test_the_figures_are_those_of_the_scorers() -> None:
    figures = figures_of(compared(ignores, uses), seed=1)
    assert (figures.rows, figures.groups) == (60, 60)
    assert figures.base_uses is not None
    assert figures.tuned_uses is not None
    assert figures.learned is not None
    assert [figures.base_uses.mean, figures.tuned_uses.mean, figures.learned.mean] == pytest.approx([0, -2, -2])
    assert figures.difference[FIRST].mean == pytest.approx(0)
    assert figures.difference[PLACEBO].mean == pytest.approx(0)


def test_without_feedback_the_loss_of_the_answers_decides() -> None:
    def constant(loss: float) -> Judge:
        return lambda feedback, answer, number: loss + noise(number)

    for base, tuned, verdict in ((3, 2, LEARNED), (2, 3, WORSE), (2, 2, NOT_SHOWN)):
        of, out = chosen(feedback=False)
        assert out == []
        found, _ = evaluated_rows(of, scorer(constant(base)), scorer(constant(tuned)))
        figures = figures_of(found, seed=1)
        assert (verdict_of(figures), figures.learned) == (verdict, None)
        assert "nats per token." in sentence_of(verdict, figures)


def test_every_row_is_evaluated_or_left_out_with_a_reason() -> None:
    some = rows(20)
    some.append(Row("val-no", some[0].conversations[:2], "codes", [], [3]))
    some.append(msgspec.structs.replace(some[3], id="val-alone", source="other"))
    of, out = chosen(some, count=12)
    assert counts_of(out) == {"no_donor": 1, "no_feedback": 1, "not_drawn": 8}
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
    assert len(found) == 59
    assert out == [LeftOut(of[0].case.row.id, "over_long", "600 tokens, more than train.max_length")]


def test_other_tokens_for_the_tuned_model_are_refused() -> None:
    def other(work: list[Work]) -> dict[str, Measured]:
        return {key: msgspec.structs.replace(each, inputs={"history": "x"}) for key, each in scorer(uses)(work).items()}

    of, _ = chosen()
    with pytest.raises(VlmflowError, match="the base and the tuned model get different tokens"):
        evaluated_rows(of, scorer(uses), other)


@pytest.mark.parametrize("number", [4, 5])
def test_an_answer_of_other_tokens_after_another_history_is_refused(number: int) -> None:
    """Also if there are as many."""

    def other(work: list[Work]) -> dict[str, Measured]:
        found = dict(scorer(uses)(work))
        for each in found.values():
            each.losses[PLACEBO] = msgspec.structs.replace(each.losses[PLACEBO], tokens=number)
            each.answers[PLACEBO] = "others"
        return found

    of, _ = chosen()
    with pytest.raises(VlmflowError, match="different tokens in different histories"):
        evaluated_rows(of, other, other)


def test_a_source_with_few_rows_has_no_interval() -> None:
    found = compared(ignores, uses)
    found[:5] = [msgspec.structs.replace(row, source="rare") for row in found[:5]]
    by_source = figures_by_source(found, seed=1)
    assert list(by_source) == ["codes", "rare"]
    assert by_source["rare"].learned is not None
    assert by_source["rare"].learned.low is None
    assert by_source["codes"].learned is not None
    assert by_source["codes"].learned.low is not None
