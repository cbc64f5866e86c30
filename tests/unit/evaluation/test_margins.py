"""From the margins of rows to figures, to a verdict, and to what people read."""

import math
from collections.abc import Callable

import msgspec
import pytest

from vlmflow.evaluation.margins import links, margin_figures, margin_report
from vlmflow.evaluation.report import (
    NEUTRAL,
    OTHER_PICTURE,
    OTHERS,
    OWN,
    QUESTION,
    Condition,
    EvaluatedRow,
    Loss,
    Margin,
    MarginFigures,
)
from vlmflow.evaluation.verdict import (
    CONDITIONS,
    LEARNED,
    NO_GAIN,
    TOO_FEW,
    TOO_FEW_WITHOUT_ECHO,
    WORSE,
    Verdict,
    falls_short,
    judge,
    row_shares,
    shown_shares,
)

OTHER = OTHERS[0]

Rule = Callable[[int], float]
"""Takes the number of a row; returns its margin."""


def margin(value: float) -> Margin:
    return Margin(right=Loss(4 * (3 - value), 4), wrong=Loss(2 * 3, 2))


def model(number: int, **rules: Rule) -> dict[str, Margin]:
    return {context: margin(rule(number)) for context, rule in rules.items()}


def evaluated(
    name: str, source: str, group: str, gold_in_feedback: bool, base: dict[str, Margin], tuned: dict[str, Margin]
) -> EvaluatedRow:
    return EvaluatedRow(name, source, [], group, "right", "wrong", None, gold_in_feedback, base, tuned)


def rows(count: int = 200, **tuned: Rule) -> list[EvaluatedRow]:
    """Return rows whose base uses feedback in half of them, and is right in three quarters of them.

    tuned: the rules of the contexts in which the tuned model differs.
    """
    base: dict[str, Rule] = {
        QUESTION: quarters,
        OWN: quarters,
        NEUTRAL: quarters,
        OTHER: lambda n: quarters(n) + (1 if n % 2 else -1) / 10,
    }
    return [
        evaluated(f"row-{n}", "fire", f"picture-{n}", n % 10 == 0, model(n, **base), model(n, **(base | tuned)))
        for n in range(count)
    ]


def quarters(number: int) -> float:
    return -1 if number % 4 == 0 else 1


def more(number: int) -> float:
    """Gain enough to use the own feedback in nine rows of ten."""
    return quarters(number) + (0.2 if number % 10 else -0.2)


def less(number: int) -> float:
    """Lose in nine rows of ten, and the right answer in half of them."""
    return -0.5 if number % 2 else quarters(number) - (0.2 if number % 10 else -0.2)


def alone(some: list[EvaluatedRow]) -> list[EvaluatedRow]:
    """Return the rows without wrong answers."""

    def without(margins: dict[str, Margin]) -> dict[str, Margin]:
        return {name: msgspec.structs.replace(each, wrong=None) for name, each in margins.items()}

    return [msgspec.structs.replace(row, base=without(row.base), tuned=without(row.tuned)) for row in some]


def test_a_margin_is_per_token_of_each_answer() -> None:
    assert Margin(Loss(6, 3), Loss(10, 2)).value == pytest.approx(3)
    assert Margin(Loss(6, 3), None).value == pytest.approx(-2)


def test_figures_are_shares_of_rows() -> None:
    found = margin_figures(rows(own=more))
    assert (found.rows, found.groups) == (200, 200)
    assert found.right_first is not None
    assert found.right_with_feedback is not None
    assert found.uses_feedback is not None
    assert (found.right_first.base.mean, found.right_first.different) == (0.75, 0)
    assert found.right_with_feedback.tuned.mean == 0.75
    assert [getattr(found.uses_feedback, of).mean for of in ("base", "tuned", "difference")] == pytest.approx(
        [0.5, 0.9, 0.4]
    )
    assert found.uses_feedback.different == 120
    assert found.sees is None
    assert found.losses[OWN].difference.mean == pytest.approx(-0.16)
    assert set(found.losses) == {QUESTION, OWN, NEUTRAL, OTHER}
    for share in (found.adds, found.helps):
        assert share is not None
        assert (share.base.mean, share.tuned.mean) == (0.5, 0.9), "the base's are ties"
    assert found.own is not None
    assert (found.own.share.mean, found.own.different) == (0.9, 200)
    assert found.one_answer is None


def test_feedback_of_several_rows_counts_on_average() -> None:
    values = {OWN: 1.0, **dict(zip(OTHERS, (0.5, 1.5, 1.0), strict=True))}
    assert row_shares({name: margin(value) for name, value in values.items()})["uses_feedback"] == 0.5
    assert row_shares({name: margin(values[name]) for name in (OWN, OTHER)})["uses_feedback"] == 1


@pytest.mark.parametrize(
    ("margins", "shares"),
    [
        ({QUESTION: 3.4, OWN: 6.0, NEUTRAL: 4.0}, {"helps": 1.0, "adds": 0.5}),
        ({QUESTION: -0.2, OWN: 0.0, NEUTRAL: -0.09}, {"helps": 1.0, "adds": 0.5}),
        ({QUESTION: 0.2, OWN: 0.0, NEUTRAL: 20.0}, {"helps": 0.0, "adds": 0.0}),
    ],
)
def test_a_difference_of_preferences_below_a_fortieth_is_a_tie(
    margins: dict[str, float], shares: dict[str, float]
) -> None:
    """σ(6) and σ(4) differ by 0.015, though two nats lie between them."""
    found = row_shares({name: margin(value) for name, value in margins.items()})
    assert {name: found[name] for name in shares} == shares


def test_a_preference_is_a_probability_also_of_one_answer() -> None:
    assert margin(0).preference == 0.5
    assert margin(2).preference == pytest.approx(1 / (1 + math.exp(-2)))
    assert (margin(2000).preference, margin(-2000).preference) == (1, 0)
    assert Margin(Loss(6, 3), None).preference == pytest.approx(math.exp(-2))


def test_a_tie_counts_half() -> None:
    some = [msgspec.structs.replace(row, base=row.base | {OTHER: row.base[OWN]}) for row in rows()]
    found = margin_figures(some).uses_feedback
    assert found is not None
    assert (found.base.mean, found.different) == (0.5, 200)


def test_rows_that_cannot_tell_are_not_counted() -> None:
    some = rows()
    for row in some[:150]:
        for of in (row.base, row.tuned):
            of[OTHER_PICTURE] = margin(0)
    for row in some[:40]:
        del row.base[OTHER], row.tuned[OTHER]
    some[40:50] = alone(some[40:50])
    found = margin_figures(some)
    told = [found.right_first, found.right_with_feedback, found.uses_feedback, found.sees, found.losses[OTHER]]
    assert [each.rows if each else 0 for each in told] == [190, 190, 160, 150, 160]


def test_the_own_picture_of_a_row_without_feedback_is_that_of_its_question() -> None:
    some = [
        evaluated(str(n), "s", str(n), False, *({QUESTION: margin(1), OTHER_PICTURE: margin(0)},) * 2)
        for n in range(100)
    ]
    found = margin_figures(some)
    assert found.sees is not None
    assert found.sees.base.mean == 1
    assert found.uses_feedback is found.right_with_feedback is None


def test_figures_without_feedback_that_gives_the_answer_away_and_by_source() -> None:
    some = rows()
    some[:30] = [msgspec.structs.replace(row, source="gqa") for row in some[:30]]
    found = margin_report(some)
    assert found.without_gold is not None
    assert (found.all.rows, found.without_gold.rows) == (200, 180)
    assert {name: each.rows for name, each in found.sources.items()} == {"fire": 170, "gqa": 30}
    assert found.with_gold is not None
    assert (found.with_gold.rows, found.with_echo, found.without_any_echo) == (20, None, found.all)
    known = margin_report([row for row in some if row.gold_in_feedback])
    assert (known.without_gold, known.with_gold) == (None, known.all)
    unknown = margin_report([row for row in some if not row.gold_in_feedback])
    assert unknown.without_gold is unknown.with_gold is None


def test_all_intervals_of_sources_hold_together() -> None:
    """Those of one source are as narrow as those of all rows."""
    one, four = (margin_report(in_sources(count)) for count in (1, 4))
    widths = []
    for report in (one, four):
        (share, *_) = [figures.uses_feedback for figures in report.sources.values()]
        assert share is not None
        assert share.difference.low is not None
        assert share.difference.high is not None
        widths.append(share.difference.high - share.difference.low)
    assert one.sources["s0"] == one.all
    assert widths[1] > 2 * 1.1 * widths[0], "a quarter of the rows, and a wider interval"


def in_sources(count: int) -> list[EvaluatedRow]:
    return [msgspec.structs.replace(row, source=f"s{n // 20 % count}") for n, row in enumerate(rows(800, own=more))]


def test_figures_of_a_mixture_are_also_by_data_set() -> None:
    some = [
        msgspec.structs.replace(row, id=f"{name}:{row.id}", source=source)
        for row, (name, source) in zip(rows(), [("fire", "fire/gqa"), ("fire", "fire"), ("chats", "chats")] * 99)  # noqa: B905
    ]
    found = {name: each.rows for name, each in margin_report(some).sources.items()}
    assert found == {"chats": 66, "fire": 134, "fire/gqa": 67}


def test_rows_that_share_a_control_are_linked_once() -> None:
    assert links(["a", "b"], [["b"], ["a"]]) == {(0, 1)}
    assert links(["a", "b", "c", "d"], [["c", "x"], ["c"], [None], ["x"]]) == {(0, 1), (0, 2), (1, 2), (0, 3)}


def judged(some: list[EvaluatedRow]) -> tuple[Verdict, MarginFigures]:
    figures = margin_report(some)
    return judge(figures), figures.all


def test_learned_says_with_what_it_was_compared() -> None:
    verdict, _ = judged(rows(own=more))
    assert (verdict.name, verdict.costs_first_answers) == (LEARNED, False)
    assert verdict.sentence == (
        "The tuned model learned to use feedback. With another row's feedback as a control, its own favours the right "
        "answer over the wrong one in 90.0% of rows, the base in 50.0%: +40.0 points [+30.3, +48.9]. With neutral "
        "feedback as a control, in 90.0% of rows, the base in 50.0%: +40.0 points [+35.2, +44.0]. With the question "
        "alone as a control, in 90.0% of rows, the base in 50.0%: +40.0 points [+35.2, +44.0]. Without the 20 rows "
        "whose feedback has the right answer: in 100.0% of rows, the base in 44.4%: +55.6 points [+47.5, +62.4]. With "
        "its own feedback the right answer is likelier than the wrong one in 75.0% of rows, the base in 75.0%: +0.0 "
        "points [-1.4, +1.4], which may be chance."
    )
    assert verdict.conditions == dict.fromkeys(CONDITIONS, Condition("met", "met"))


def test_worse_is_less_often_right_after_feedback_whatever_else_rose() -> None:
    for other in (lambda n: less(n) - 0.1, lambda n: less(n) + 0.1):
        verdict, figures = judged(rows(own=less, other=other))
        assert verdict.name == WORSE
        assert verdict.sentence.startswith("The tuned model answers worse after feedback than its base.")
        assert falls_short("not_worse", verdict, figures) == "not_worse, but the verdict is 'worse'"
    less_used, _ = judged(rows(other=lambda n: quarters(n) + 0.1))
    assert less_used.name == NO_GAIN


def in_all_rows(number: int) -> float:
    """Gain enough by the own feedback, against any control."""
    return quarters(number) + (0.4 if number % 10 else -0.4)


@pytest.mark.parametrize(
    ("missing", "tuned"),
    [
        ("uses_feedback", {OTHER: in_all_rows}),
        ("adds", {NEUTRAL: in_all_rows}),
        ("helps", {QUESTION: in_all_rows}),
    ],
)
def test_each_control_is_a_condition(missing: str, tuned: dict[str, Rule]) -> None:
    verdict, _ = judged(rows(own=in_all_rows, **tuned))
    assert verdict.name == NO_GAIN
    states = {name: state.all for name, state in verdict.conditions.items()}
    assert states == dict.fromkeys(CONDITIONS, "met") | {missing: states[missing]}
    assert (CONDITIONS[missing] in verdict.sentence) == (missing != "helps")
    assert ("more often right than to the question alone" in verdict.sentence) == (missing == "helps")


def test_a_share_that_rose_must_be_above_one_half_too() -> None:
    """A model that unlearns to be led astray by its own feedback ignores it at best."""
    some = rows(own=lambda n: quarters(n) + (-1) ** n * 0.2)
    some = [
        msgspec.structs.replace(row, base=row.base | {OWN: margin(quarters(n) - 0.3)}) for n, row in enumerate(some)
    ]
    verdict, figures = judged(some)
    assert figures.uses_feedback is not None
    assert figures.uses_feedback.difference.above_zero
    assert (verdict.name, verdict.conditions["adds"].all) == (NO_GAIN, "open")


def test_a_base_that_is_likelier_to_be_right_refutes() -> None:
    """Each control falls more than the own feedback does."""
    low = {name: lambda n: quarters(n) - 2 for name in (QUESTION, NEUTRAL, OTHER)}
    verdict, _ = judged(rows(own=lambda n: quarters(n) - 0.4, **low))
    assert {name: state.all for name, state in verdict.conditions.items()} == {
        "uses_feedback": "met",
        "adds": "met",
        "helps": "met",
        "own": "refuted",
    }
    assert verdict.name == NO_GAIN


def test_rows_with_echo_do_not_decide() -> None:
    gains = [msgspec.structs.replace(row, echo=["red"]) for row in rows(150, own=in_all_rows)]
    rest = [msgspec.structs.replace(row, id=f"n{row.id}", group=f"n{row.group}") for row in rows(150)]
    assert judged([msgspec.structs.replace(row, echo=[]) for row in gains] + rest)[0].name == LEARNED
    verdict, _ = judged(gains + rest)
    assert verdict.name == NO_GAIN
    assert verdict.conditions["adds"] == Condition("met", "open")
    few, _ = judged(gains + rest[:99])
    assert few.name == TOO_FEW_WITHOUT_ECHO
    assert "Without them, there are 99 different pictures or questions, and 100 are needed" in few.sentence
    none, _ = judged(gains)
    assert none.name == TOO_FEW_WITHOUT_ECHO


def test_learned_says_what_remains_without_the_rows_that_are_told_the_answer() -> None:
    verdict, _ = judged([msgspec.structs.replace(row, gold_in_feedback=n < 40) for n, row in enumerate(rows(own=more))])
    assert verdict.name == LEARNED
    assert "Without the 40 rows whose feedback has the right answer: in 90.0% of rows" in verdict.sentence


def test_the_ceiling_is_named() -> None:
    def near(number: int) -> float:
        return quarters(number) + (0.1 if number % 20 < 2 else -0.1)

    some = [msgspec.structs.replace(row, base=row.base | {OTHER: margin(near(n))}) for n, row in enumerate(rows())]
    for tuned, name in ((lambda n: near(n + 2), NO_GAIN), (near, TOO_FEW)):
        changed = [
            msgspec.structs.replace(row, tuned=row.base | {OTHER: margin(tuned(n))}) for n, row in enumerate(some)
        ]
        verdict, _ = judged(changed)
        assert verdict.name == name
        assert "The base already tells its own feedback in nearly all rows" in verdict.sentence
    assert "nearly all" not in judged(rows(own=lambda n: quarters(n) + (n % 3 - 1)))[0].sentence


def test_too_few_rows_say_how_many_are_missing() -> None:
    few, _ = judged(rows(60, own=more))
    assert few.name == TOO_FEW
    assert few.sentence.startswith(
        "Too few rows for a verdict: 60 different pictures or questions, and 100 are needed: 40 are missing."
    )
    alike, _ = judged(rows(own=lambda n: quarters(n) + (1 if n < 8 else 0)))
    assert alike.name == TOO_FEW
    assert "the models differ in 4 of 200 rows, and 10 such rows are needed: 6 are missing." in alike.sentence


def test_first_answers_that_it_costs_are_said_beside_any_verdict() -> None:
    verdict, figures = judged(rows(own=more, question=lambda n: quarters(n + 1) if n % 3 else -1))
    assert (verdict.name, verdict.costs_first_answers) == (LEARNED, True)
    assert "It costs first answers: without feedback, the right one is likelier in 50.0% of rows" in verdict.sentence
    assert falls_short("learned", verdict, figures) is None
    assert falls_short("not_worse", verdict, figures) == "not_worse, but it costs first answers"


def test_in_rows_with_one_answer_its_loss_counts() -> None:
    learned, figures = judged(alone(rows(own=more)))
    assert (learned.name, figures.right_first, figures.right_with_feedback) == (LEARNED, None, None)
    assert "The loss of the right answer with its own feedback changed by -0.160 [" in learned.sentence
    assert judged(alone(rows(own=less)))[0].name == WORSE
    lost = judged(alone(rows(own=lambda n: more(n) - 5, other=lambda n: quarters(n) - 5)))[0]
    assert lost.name == WORSE


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda n: 0.1 * (1 + n % 2), LEARNED),
        (lambda n: -0.1 * (1 + n % 2), WORSE),
        (lambda n: 0, TOO_FEW),
        (lambda n: 0.1 if n % 10 else -5, NO_GAIN),
        (lambda n: -0.1 if n % 10 else 5, NO_GAIN),
    ],
)
def test_without_feedback_the_loss_of_the_answers_decides(change: Rule, name: str) -> None:
    """A few rows that lose much, or gain much, are no verdict."""
    some = [
        evaluated(row.id, "s", row.group, False, {QUESTION: row.base[QUESTION]}, {QUESTION: row.tuned[QUESTION]})
        for row in alone(rows(question=lambda n: quarters(n) + change(n)))
    ]
    verdict, figures = judged(some)
    assert verdict.name == name
    assert "nats per token; less is better. It fell in " in verdict.sentence
    assert ("a few rows lost much" in verdict.sentence) == (change(1) > 0 > change(10))
    assert falls_short("uses_feedback", verdict, figures) == "uses_feedback, but its rows have no feedback"


@pytest.mark.parametrize(
    ("own", "short_of"),
    [
        (more, set()),
        (lambda n: quarters(n) + 0.01 * (-1) ** (n // 2), {"learned", "uses_feedback"}),
        (less, {"learned", "uses_feedback", "not_worse"}),
    ],
)
def test_what_a_run_must_show(own: Rule, short_of: set[str]) -> None:
    verdict, figures = judged(rows(own=own))
    for require in ("learned", "uses_feedback", "not_worse"):
        assert (falls_short(require, verdict, figures) is not None) == (require in short_of)


def test_a_list_requires_each_also_of_a_measure() -> None:
    verdict, figures = judged(rows(own=more, question=lambda n: quarters(n + 1) if n % 3 else -1))
    fell = "right_first: not_worse, but it fell: in 50.0% of rows, the base in 75.0%: -25.0 points"
    assert (falls_short(["learned", {"right_first": "not_worse"}], verdict, figures) or "").startswith(fell)
    assert falls_short([{"right_with_feedback": "not_worse", "adds": "not_worse"}, "learned"], verdict, figures) is None
    assert falls_short({"sees": "not_worse"}, verdict, figures) == "sees: not_worse, but no row can tell it"


def test_a_base_that_used_feedback_already_fulfils_its_use_alone() -> None:
    some = [msgspec.structs.replace(row, base=row.tuned) for row in rows(own=more)]
    verdict, figures = judged(some)
    assert verdict.name == TOO_FEW
    assert falls_short("uses_feedback", verdict, figures) is None
    assert falls_short("learned", verdict, figures) == "learned, but the verdict is 'too few rows'"


def test_few_rows_do_not_show_that_feedback_is_used() -> None:
    verdict, figures = judged(rows(60, own=more))
    assert falls_short("uses_feedback", verdict, figures) == (
        "uses_feedback, but it uses feedback in 90.0% of rows; the whole interval must be above 50%"
    )


def test_shown_shares_are_those_that_rows_can_tell() -> None:
    assert [each.rows for _, each in shown_shares(margin_figures(rows()))] == [200] * 5
    assert len(shown_shares(margin_figures(alone(rows())))) == 3
