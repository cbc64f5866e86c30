"""Partners: each item gives once and takes once, as many as possible, the nearest in words."""

import json
import time
from itertools import permutations
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import made_row, real_rows
from simulated_evaluations import row
from vlmflow.evaluation.choice import (
    DONORS,
    Case,
    Item,
    derange,
    echoes,
    feedback_donors,
    neutral_feedback,
    picture_donors,
    read_case,
    with_right_last,
    without_donor,
    words_of,
)
from vlmflow.rows.chat import Turn
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.trajectories import Trajectory, trajectory_row
from workflow_runs import ROOT


def apart(*names: str) -> dict[str, frozenset[str]]:
    """Return what an item has, and refuses in others."""
    return {"has": frozenset(names), "refuses": frozenset(names)}


def items_of(count: int, seed: int, strata: int = 1) -> list[Item]:
    random = Random(seed)
    return [
        Item(
            name=f"row-{number}",
            stratum=random.randrange(strata),
            **apart(f"group {random.randrange(count)}", f"answer {random.choice('aab')}"),
            words=frozenset(random.sample(["once", "upon", "a", "time", "there", "was"], random.randrange(5))),
        )
        for number in range(count)
    ]


@given(st.integers(1, 40), st.integers(0, 1000))
def test_who_gives_takes_each_once_within_a_stratum_and_apart(count: int, seed: int) -> None:
    of = {item.name: item for item in items_of(count, seed, strata=3)}
    found = derange(list(of.values()), seed)
    assert sorted(found) == sorted(found.values())
    for taker, giver in found.items():
        assert of[taker].stratum == of[giver].stratum
        assert of[taker].refuses.isdisjoint(of[giver].has)


@given(st.integers(2, 6), st.integers(0, 1000))
def test_as_many_as_possible_have_a_partner(count: int, seed: int) -> None:
    """Compared with all permutations."""
    of = items_of(count, seed)
    fit = [[one.refuses.isdisjoint(other.has) for other in of] for one in of]
    most = max(
        sum(place != to for place, to in enumerate(order))
        for order in permutations(range(count))
        if all(place == to or fit[place][to] for place, to in enumerate(order))
    )
    assert len(derange(of, seed)) == most


def test_partners_are_near_in_words_that_are_rare() -> None:
    """What half of all rows say tells little of their topic, though it has more words."""
    topics = ["red cat", "steep tower", "old book", "fast train"]
    of = [
        Item(f"{topic}, {form}", None, **apart(f"{topic}, {form}"), words=words_of([topic, form]))
        for topic in topics
        for form in ("this is wrong", "please look again")
    ]
    for taker, giver in derange(of, 0).items():
        assert taker.split(",")[0] == giver.split(",")[0]


def test_the_order_of_items_does_not_count() -> None:
    of = items_of(60, 3, strata=2)
    found = derange(of, 5)
    assert derange(of[::-1], 5) == found
    assert derange(of, 6) != found


@pytest.mark.lengthy
def test_three_thousand_rows_take_seconds() -> None:
    """And the sixth over it are in a part of their own."""
    random = Random(0)
    vocabulary = [f"word{number}" for number in range(3000)]
    of = [
        Item(
            name=str(n),
            stratum=None,
            **apart(f"group {n // 2}", f"answer {n % 2}"),
            words=frozenset(random.sample(vocabulary, 60)),
        )
        for n in range(3500)
    ]
    for some in (of[:3000], of):
        began = time.process_time()
        assert len(derange(some, 0)) > 0.95 * len(some)
        assert time.process_time() - began < 30


def cases(*of: tuple[str, str, float]) -> list[Case]:
    """Return rows with a right answer, feedback and the score of the first answer; each has a picture of its own."""
    found = []
    for number, (answer, feedback, score) in enumerate(of):
        made = msgspec.structs.replace(row(number, answer, score=score), id=str(number), images=[str(number)])
        made.conversations[2] = Turn("human", feedback)
        found.append(read_case(made, {str(number): f"{number:064}"}))
    return found


def names_of(donors: dict[str, Case]) -> dict[str, str]:
    return {name: case.row.id for name, case in donors.items()}


@pytest.mark.parametrize(
    ("why", "other"),
    [
        ("the same answer", ("Red.", "Not blue.", 3)),
        ("the same feedback", ("green", "Look  AGAIN.", 3)),
        ("another score", ("green", "Not blue.", 4)),
    ],
)
def test_what_no_donor_has(why: str, other: tuple[str, str, float]) -> None:
    assert feedback_donors(cases(("red", "Look again.", 3), other), {}, 0) == {}, why
    assert len(feedback_donors(cases(("red", "Look again.", 3), ("green", "Not blue.", 3)), {}, 0)) == 2


def test_gold_answers_count_beside_last_ones() -> None:
    """FIRE's last answers are sentences, and a gold answer is a word."""
    of = cases(("Yes, it is wicker.", "Look again.", 3), ("Yes, it is red.", "Not blue.", 3))
    assert len(feedback_donors(of, {"0": "yes"}, 0)) == 2
    assert feedback_donors(of, {"0": "yes", "1": "Yes"}, 0) == {}


def test_all_scores_count() -> None:
    of = cases(("red", "Look again.", 3), ("green", "Not blue.", 3))
    of[1].row.scores[-1] = 8
    assert feedback_donors(of, {}, 0) == {}


def test_a_feedback_of_one_topic_comes_from_a_row_of_that_topic() -> None:
    cats, towers = "The fur of the cat is not {}.", "The tower is not {} metres high."
    of = cases(
        ("red", cats.format("blue"), 3),
        ("40", towers.format(30), 3),
        ("grey", cats.format("white"), 3),
        ("50", towers.format(60), 3),
    )
    first = {name: some[0] for name, some in feedback_donors(of, {}, 0).items()}
    assert names_of(first) == {"0": "2", "2": "0", "1": "3", "3": "1"}


def test_a_row_has_up_to_three_donors_whose_feedback_differs() -> None:
    """Each time who gives also takes, once; of what is left, a row keeps what it has."""
    of = cases(*((f"answer {n}", f"feedback {n}", 3) for n in range(5)), ("other", "feedback 0", 3))
    found = feedback_donors(of, {}, 0)
    for turn in range(DONORS):
        some = names_of({name: donors[turn] for name, donors in found.items() if len(donors) > turn})
        assert sorted(some) == sorted(some.values())
        assert len(some) >= 4
    for name, donors in found.items():
        feedbacks = [case.feedback[0] for case in donors]
        assert of[int(name)].feedback[0] not in feedbacks
        assert len(set(feedbacks)) == len(feedbacks)
    three = feedback_donors(cases(*((f"answer {n}", f"feedback {n}", 3) for n in range(3))), {}, 0)
    assert {len(donors) for donors in three.values()} == {2}, "there are two others"


def said(attempt: str, feedback: str, right: str) -> Case:
    """Return a row whose question is "What is it?"."""
    turns = [Turn("human", "What is it?"), Turn("gpt", attempt), Turn("human", feedback), Turn("gpt", right)]
    return read_case(made_row(f"{attempt}, {feedback}, {right}", turns, "s", [], [3, 10]), {})


def test_an_echo_is_a_word_of_the_feedback_that_question_and_attempts_lack() -> None:
    plain = [said(f"try {n}", "Score: 3.\nFeedback: Look at the box.", f"Answer: word {n}") for n in range(50)]
    red = said("blue", "Score: 3.\nFeedback: It is a Red ball.", "Thought: a ball.\nAnswer: red")
    known = [
        said("a red one", "Score: 3.\nFeedback: Red is right.", "Answer: red"),
        said("blue", "Score: 3.\nFeedback: Is it?", "Answer: it is"),
        said("blue", "Score: 3.\nFeedback: Wrong.", "Answer: 3"),
    ]
    found = echoes([*plain, red, *known])
    assert {name: words for name, words in found.items() if words} == {red.row.id: ["red"]}


def test_the_real_rows_with_echo_are_as_many_as_the_page_says() -> None:
    rows = [
        json.dumps(raw).encode()
        for name in ("FIRE-test.json", "FIRE-train-100K.json")
        for raw in json.loads(real_rows(name).read_bytes())
    ]
    found = [read_trajectory(row) for row in rows]
    of = [trajectory_row(f"row-{n}", each) for n, each in enumerate(found) if isinstance(each, Trajectory)]
    cut = [with_right_last(read_case(each, dict.fromkeys(each.images, ""))) for each in of]
    cases = [case for case in cut if isinstance(case, Case) and case.feedback]
    marked = sum(map(bool, echoes(cases).values()))
    said = (ROOT / "docs" / "evaluation.md").read_text()
    assert f"On {len(cases)} real rows of FIRE this marks {100 * marked / len(cases):.0f} %" in " ".join(said.split())


def test_what_right_answers_have_anyway_is_no_echo() -> None:
    """A "the" stands in every second right answer, whether the feedback has it or not."""
    rights = ("it", "the box", "it", "the cat")
    of = [said(f"try {n}", "see the box" if n % 4 < 2 else "look there", rights[n % 4]) for n in range(100)]
    assert {word for words in echoes(of).values() for word in words} == {"box"}


def test_a_character_is_a_word_in_languages_without_blanks() -> None:
    of = [said(f"不{n}", "看看。", "狗") for n in range(20)]
    red = said("蓝色", "它是红的球", "红")
    assert echoes([*of, red])[red.row.id] == ["红"]


@pytest.mark.parametrize(
    ("own", "neutral"),
    [
        ("Score: 3.\nFeedback: It is red.", "Score: 3.\nFeedback: Wrong."),
        ("**Score:** 3/10\n**Feedback:** It is red.", "**Score:** 3/10\n**Feedback:** Wrong."),
        ("A score of 3 is given to the answer. It is red.", "A score of 3 is given to the answer. Wrong."),
        ("It is red. Score: 3. Feedback: no", "Wrong."),
        ("It is red.", "Wrong."),
    ],
)
def test_neutral_feedback_has_the_form_and_score_of_the_own(own: str, neutral: str) -> None:
    case = said("blue", own, "red")
    assert neutral_feedback(case, ["Wrong."]) == [neutral]
    texts = [f"text {n}" for n in range(3)]
    several = [neutral_feedback(said(f"blue {n}", own, "red"), texts)[0] for n in range(30)]
    assert len(set(several)) == 3, "each row has one of the texts"
    assert neutral_feedback(case, texts) == neutral_feedback(case, texts)


def test_another_picture_shows_something_else() -> None:
    of = cases(("red", "a", 1), ("green", "b", 2), ("red", "c", 3))
    found = names_of(picture_donors(of, {}, 0))
    assert sorted(found) == sorted(found.values())
    assert len(found) == 2
    assert found["1"] in {"0", "2"}


def test_a_row_without_a_picture_has_no_other_picture() -> None:
    of = [read_case(row(number, f"c{number}"), {}) for number in range(4)]
    assert picture_donors(of, {}, 0) == {}


def test_pictures_of_one_group_are_no_partners() -> None:
    same = {"0": "0" * 64, "1": "0" * 64}
    of = [read_case(msgspec.structs.replace(row(n, f"c{n}"), images=[str(n)]), same) for n in range(2)]
    assert picture_donors(of, {}, 0) == {}


def test_who_is_left_out_is_told_why() -> None:
    (of,) = cases(("red", "Look again.", 3))
    assert without_donor(of).detail.startswith(
        "no other row of source codes with 1 turns of feedback and scores 3, 10 is"
    )
