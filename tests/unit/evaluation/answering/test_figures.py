"""Models of known behaviour have the figures that follow from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_server import chat_server, last_text
from made_cases import row
from training_rows import made_row
from vlmflow.evaluation.answers import Asking, ask_both, figures, sentence_of
from vlmflow.evaluation.asking import ModelAtUrl
from vlmflow.evaluation.choice import Case, read_case
from vlmflow.evaluation.report import AfterRounds, AnsweredRow, AskedModel, Interval
from vlmflow.rows.chat import Turn

COUNT = 120

Speaks = Callable[[str], str]
"""Takes the last human turn."""


def copies(said: str) -> str:
    """Answer with the code in the feedback."""
    return f"Thought: so it is.\nAnswer: {said.rpartition('It is ')[2]}"


def never(said: str) -> str:
    return "Answer: none"


def always(said: str) -> str:
    return "Answer: code"


def gives_in(said: str) -> str:
    """Be right at first, and wrong after feedback."""
    return "Answer: code" if said.startswith("What") else "Answer: none"


def cases(code: str = "code", feedback: str | None = None) -> list[Case]:
    made = [row(number, code) for number in range(COUNT)]
    if feedback is not None:
        for each in made:
            each.conversations[2].value = feedback
    return [read_case(each, {}) for each in made]


def ask(
    folder: Path, base: Speaks, tuned: Speaks, some: list[Case], feedback: bool = True, rounds: int = 3
) -> tuple[dict[str, Any], list[AnsweredRow], AskedModel, AskedModel]:
    speak = {"base": base, "tuned": tuned}

    def behave(model: str, messages: list[dict[str, Any]]) -> str:
        return speak[model](last_text(messages))

    how = Asking(rounds=rounds, max_tokens=9, feedback=feedback, gold={}, pictures=folder, store=folder, seed=1)
    with chat_server(behave) as server:
        models = [ModelAtUrl(name, name, server.url, name) for name in ("base", "tuned")]
        rows, of_base, of_tuned = ask_both(some, models[0], models[1], how)
    return dict(figures(rows, how)), rows, of_base, of_tuned


def changes(after: AfterRounds) -> list[tuple[int, int, float | None]]:
    """Give first answers, changes and their rate: the base's corrected and spoiled ones, and the tuned model's."""
    models = (after.base, after.tuned)
    found = [change for model in models for change in (model.corrected, model.spoiled) if change]
    return [(change.first, change.changed, change.rate.mean if change.rate else None) for change in found]


def test_who_copies_from_feedback_corrects_all_and_spoils_nothing(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases())
    first, second = found["all"]
    assert (first.rounds, first.rows, first.groups, second.rounds) == (0, COUNT, COUNT, 1)
    assert (first.base.right.mean, first.tuned.right.mean) == (0, 0)
    assert first.base.corrected is None, "no round of feedback, no transition"
    assert (second.base.right.mean, second.tuned.right.mean) == (0, 1)
    assert second.right.mean == 1
    assert second.right.above_zero
    assert changes(second) == [(COUNT, 0, 0), (0, 0, None), (COUNT, COUNT, 1), (0, 0, None)]
    assert found["holds_gold"] == 1.0
    assert found["with_gold"] == found["all"]
    assert found["without_gold"] is None
    assert [turn.tuned.answer for turn in rows[0].turns] == ["What is the code of door 0?", "code."]
    assert [turn.gold for turn in rows[0].turns] == ["code", "code"]
    assert "after 1 round 0.0% of the base's and 100.0% of the tuned model's answers are right" in sentence_of(
        found["all"], feedback=True
    )


def test_who_gives_in_spoils_what_was_right(tmp_path: Path) -> None:
    found, _, _, _ = ask(tmp_path, always, gives_in, cases(feedback="Look again."))
    _, second = found["all"]
    assert changes(second) == [(0, 0, None), (COUNT, 0, 0), (0, 0, None), (COUNT, COUNT, 1)]
    assert second.right.mean == -1
    assert found["holds_gold"] == 0.0
    assert found["without_gold"] == found["all"]
    assert found["with_gold"] is None


def test_rows_whose_feedback_holds_the_answer_have_figures_of_their_own(tmp_path: Path) -> None:
    some = cases()[: COUNT // 4] + cases(feedback="Look again.")[COUNT // 4 :]
    found, _, _, _ = ask(tmp_path, never, copies, some)
    assert found["holds_gold"] == 0.25
    of = {name: found[name][1] for name in ("all", "with_gold", "without_gold")}
    assert {name: (each.rows, each.tuned.right.mean) for name, each in of.items()} == {
        "all": (COUNT, 0.25),
        "with_gold": (COUNT // 4, 1.0),
        "without_gold": (COUNT * 3 // 4, 0.0),
    }


def test_figures_by_source_and_rule(tmp_path: Path) -> None:
    some = [
        read_case(row(number, "6" if number % 2 else "B", source="odd" if number % 2 else "even"), {})
        for number in range(8)
    ]
    found, _, _, _ = ask(tmp_path, never, copies, some)
    assert {name: after[1].rows for name, after in found["sources"].items()} == {"even": 4, "odd": 4}
    assert {name: after[1].rows for name, after in found["rules"].items()} == {"number": 4, "option": 4}
    assert found["rules"]["option"][1].tuned.right == Interval(1, None, None), "too few rows for an interval"


def test_rows_without_so_many_rounds_are_not_counted_after_them(tmp_path: Path) -> None:
    longer = row(99, "code")
    longer.conversations[4:] = [Turn("human", "Well done. It is code"), Turn("gpt", "Answer: code")]
    found, _, _, _ = ask(tmp_path, never, copies, [*cases()[:3], read_case(longer, {})])
    assert [after.rows for after in found["all"]] == [4, 4, 1]


def test_without_feedback_there_are_no_transitions(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases(), feedback=False)
    first, second = found["all"]
    assert (first.base.right.mean, first.tuned.right.mean) == (1, 0), "the row's own first answer is the right one"
    assert second.base.corrected is None
    assert (found["holds_gold"], found["without_gold"], found["with_gold"]) == (None, None, None)
    assert {each.holds_gold for each in rows} == {None}


def test_feedback_that_no_model_saw_gives_nothing_away(tmp_path: Path) -> None:
    found, rows, _, _ = ask(tmp_path, never, copies, cases(), rounds=0)
    assert [after.rounds for after in found["all"]] == [0]
    assert (found["holds_gold"], found["without_gold"], found["with_gold"]) == (None, None, None)
    assert {each.holds_gold for each in rows} == {None}


def test_overlap_is_with_the_rows_own_turns(tmp_path: Path) -> None:
    some = [
        made_row(f"r{n}", [Turn("human", f"What {n}?"), Turn("gpt", f"the answer to {n} is {n}")]) for n in range(5)
    ]

    def repeats(said: str) -> str:
        number = said.removeprefix("What ").removesuffix("?")
        return f"the answer to {number} is {number}"

    _, _, base, tuned = ask(tmp_path, never, repeats, [read_case(each, {}) for each in some])
    assert (base.overlap.answers, tuned.overlap.bleu) == (5, [1.0] * 4)
    assert tuned.overlap.cider == pytest.approx(10)
    assert base.overlap.bleu[3] < 0.01
