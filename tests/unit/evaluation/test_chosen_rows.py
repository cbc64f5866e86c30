"""The choice of rows and of the placebo's donors."""

import time
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from made_cases import row, rows
from vlmflow.evaluation.choice import Case, draw, last_attempts, read_case, without_single_turns
from vlmflow.evaluation.donors import find_donors
from vlmflow.evaluation.passes import passes_with_feedback
from vlmflow.evaluation.scoring.answer_text import answer_in, normalised
from vlmflow.rows.chat import Turn

SHA = {"a.jpg": "a" * 64, "b.jpg": "b" * 64, "copy-of-a.jpg": "a" * 64}


def test_rows_of_one_picture_are_one_group_whatever_its_name() -> None:
    cases = [read_case(row(n, "c", images=[name]), SHA) for n, name in enumerate(["a.jpg", "copy-of-a.jpg", "b.jpg"])]
    assert cases[0].group == cases[1].group != cases[2].group


def test_rows_without_a_picture_are_grouped_by_their_question() -> None:
    one, same, other = row(1, "x"), row(1, "y"), row(2, "x")
    groups = [read_case(each, {}).group for each in (one, same, other)]
    assert groups[0] == groups[1] != groups[2]


def test_of_a_trajectory_in_timestep_form_the_last_row_is_evaluated() -> None:
    of = [msgspec.structs.replace(row(n, "c"), id=f"val-{n}-a{attempt}") for n in (1, 2) for attempt in (1, 2, 10)]
    kept, out = last_attempts([read_case(each, {}) for each in of])
    assert [case.row.id for case in kept] == ["val-1-a10", "val-2-a10"]
    assert {left.reason for left in out} == {"earlier_attempt"}
    assert len(out) == 4


def test_an_answer_that_also_has_a_row_of_its_own_is_evaluated_once() -> None:
    """In both forms."""
    of = [msgspec.structs.replace(row(1, "c"), id=f"val-1{end}") for end in ("", "-a1", "-a2", "-single")]
    kept, out = without_single_turns([read_case(each, {}) for each in of])
    assert [case.row.id for case in kept] == ["val-1", "val-1-a1", "val-1-a2"]
    assert [(left.id, left.reason) for left in out] == [("val-1-single", "single_turn")]


@given(st.integers(1, 40), st.integers(0, 5))
def test_whole_pictures_are_drawn_and_more_rows_include_fewer(count: int, seed: int) -> None:
    of = [read_case(row(n // 3, f"c{n}"), {}) for n in range(30)]
    drawn, others = draw(of, count, seed, "runs.my-run.answer.rows")
    assert min(count, 30) <= len(drawn) < count + 3
    assert len(drawn) + len(others) == 30
    assert {out.detail for out in others} <= {f"{count} rows were to be drawn (runs.my-run.answer.rows)"}
    assert not {case.group for case in drawn} & {case.group for case in of if case not in drawn}
    assert {case.row.id for case in drawn} <= {case.row.id for case in draw(of, count + 1, seed, "k")[0]}


def cases_of(count: int, seed: int) -> list:
    random = Random(seed)
    return [
        read_case(
            row(
                random.randrange(count),
                f"c{random.randrange(4)}",
                source=random.choice("xy"),
                score=random.choice([3, 5]),
            ),
            {},
        )
        for _ in range(count)
    ]


@given(st.integers(2, 40), st.integers(0, 1000))
def test_a_donor_is_alike_in_all_but_picture_and_answer(count: int, seed: int) -> None:
    """And there is none only if no row is."""
    of = [read_case(msgspec.structs.replace(case.row, id=str(n)), {}) for n, case in enumerate(cases_of(count, seed))]
    tokens = {case.row.id: Random(case.row.id).randrange(9) for case in of}
    gold = {case.row.id: f"c{n % 5}" for n, case in enumerate(of) if n % 3}
    found = find_donors(of, tokens, gold, seed)
    assert found == find_donors(of, tokens, gold, seed)

    def right(case: Case) -> set[str]:
        texts = [case.answer, *([gold[case.row.id]] if case.row.id in gold else [])]
        return {normalised(answer_in(text)) for text in texts}

    for case in of:
        fit = [
            other
            for other in of
            if other.row.source == case.row.source
            and other.score == case.score
            and other.group != case.group
            and not right(other) & right(case)
        ]
        donor = found.get(case.row.id)
        assert (donor is not None) == bool(fit)
        if donor is not None:
            assert donor.row.id in {other.row.id for other in fit}
            near = min(abs(tokens[other.row.id] - tokens[case.row.id]) for other in fit)
            assert abs(tokens[donor.row.id] - tokens[case.row.id]) == near


def test_answers_that_say_the_same_in_other_words_make_no_donor() -> None:
    """FIRE's last answers are sentences; its gold answer is a word."""
    of = [read_case(row(n, text), {}) for n, text in enumerate(["Yes, it is wicker.", "Yes, it is red.", "No."])]
    tokens = dict.fromkeys((case.row.id for case in of), 1)
    gold = dict(zip((case.row.id for case in of), ["Yes", "yes", "no"], strict=True))
    for case in of[:2]:
        assert find_donors(of, tokens, gold, 0)[case.row.id] is of[2]


def test_many_rows_with_one_answer_cost_little_time() -> None:
    """Each of them looked at all others: a minute for 8,000 rows."""
    of = [read_case(msgspec.structs.replace(row(n, "yes"), id=str(n)), {}) for n in range(8000)]
    of.append(read_case(msgspec.structs.replace(row(8000, "no"), id="no"), {}))
    began = time.process_time()
    found = find_donors(of, dict.fromkeys((case.row.id for case in of), 1), {}, 0)
    assert {donor.row.id for name, donor in found.items() if name != "no"} == {"no"}
    assert time.process_time() - began < 10


def test_a_donor_has_as_many_turns_of_feedback() -> None:
    longer = row(9, "c9")
    longer.conversations[2:2] = [Turn("human", "Score: 1. No."), Turn("gpt", "Answer: c1")]
    of = [read_case(each, {}) for each in [row(1, "c1"), row(2, "c2"), longer]]
    found = find_donors(of, dict.fromkeys((case.row.id for case in of), 1), {}, 0)
    assert longer.id not in found
    assert {case.row.id for case in found.values()} == {of[0].row.id, of[1].row.id}


def test_the_placebo_has_the_donors_feedback_alone() -> None:
    own, donor = (read_case(each, {}) for each in rows(2))
    system = Turn("system", "Be brief.")
    own.row.conversations.insert(0, system)
    passes = passes_with_feedback(own, donor)
    assert [turn.value for turn in passes["placebo"]] == [
        "Be brief.",
        "What is the code of door 0?",
        "Answer: none",
        "Score: 3. It is c1.",
        "Thought: I see.\nAnswer: c0",
    ]
    assert passes["history"] == own.row.conversations
    assert [turn.value for turn in passes["question"]] == [
        "Be brief.",
        "What is the code of door 0?",
        "Thought: I see.\nAnswer: c0",
    ]
    assert [turn.value for turn in passes["first"]][1:] == ["What is the code of door 0?", "Answer: none"]
    assert len({tuple(turn.speaker for turn in turns) for turns in passes.values()}) == 2
