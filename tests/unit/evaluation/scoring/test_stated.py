"""An answer in words is right if it states the right words, or yes or no first, and nothing against them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.evaluation.scoring.judge import judge, rule_of

COLOURS = st.sampled_from(["red", "dark blue", "Delta", "Straße", "two birds", "water-skiing"])

PLAIN = st.sampled_from(
    ["{}", "It is {}.", "The colour of the car is {}.", "No, it is {}.", "{} is what I see", "This is a {} car."]
)
"""Sentences that state one thing."""

AGAINST = st.sampled_from(
    [
        *("It is not {}.", "It isn't {}.", "not {}", "I do not think that it is {}.", "There is no {}.", "Never {}!"),
        *("{} or green", "green or {}", "Either {} or green.", "green/{}", "{}/green", "It is green, {}."),
        *("{}, green", "green and {}", "{} and green", "green, {} and white", "Green. {}.", "- {}\n- green"),
        *(
            "{} is wrong.",
            "{} is not it.",
            "It is {}. No, it is green.",
            "{}... Actually, green.",
            "{}? No.",
            "Is it {}?",
        ),
        *("It might be {}. It might also be green.", "It looks like {}, but it is green.", "green instead of {}"),
        *("It looks {} but is green.", "It changed from {} to green", "green vs {}", "1. green 2. {}"),
        *("I doubt it is {}", "far from {}", "{} is ruled out"),
        *("green rather than {}", "anything but {}", "The car next to the {} truck is green.", "un{}ly", "{0}{0}"),
    ]
)
"""Sentences that do not."""


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("No, it is not raining.", "no"),
        ("NO", "No."),
        ("Yes, the armchair is grey.", "Yes, the armchair is gray."),
        ("Yes, there is no doubt.", "yes"),
        ("Yes, it is a knot.", "yes"),
        ("The people in this picture are standing.", "standing"),
        ('The title of the book is "The Dreaming Void".', "the dreaming void"),
        ("The kites are in the air.", "in air"),
        ("The issue is no. 110.", "no. 110"),
        ("The authors are Henry L. Chung and Lisa S. Winkler.", "henry l. chung     lisa s. winkler"),
        ("I never take selfies.", "never"),
        ("The sign says no parking.", "No parking"),
        ("Mozambique, not Kuwait.", "Mozambique"),
        ("It is Delta, as shown on the tail.", "delta"),
        ("Bobby Jindal has the highest blue bar.", "Bobby Jindal"),
        ("The wine is 5 years old.", "five years"),
        ("He wears red, white.", "red and white"),
        ("The vegetable to the left of the broccoli is a beet.", "The vegetable is a beet."),
        ("The tool to the right of the oven that is not little is a pot.", "The tool is a pot."),
        ("A beet.", "The vegetable is a beet."),
        ("the ground", "The ground is covered by sand."),
        ("one " * 40 + "two", "one " * 41),
    ],
)
def test_right_words(answer: str, gold: str) -> None:
    assert judge(answer, gold).right


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("Yes, it is raining.", "no"),
        ("No, the sign says yes.", "yes"),
        ("No, the sign says yes.", "no"),
        ("Yes and no.", "yes"),
        ("Yes or no", "yes"),
        ("yes/no", "yes"),
        ("Not yes", "yes"),
        ("I do not know.", "no"),
        *((said, "no") for said in ("No doubt, it is open.", "No idea", "No answer.", "no, wait, it does")),
        ("No. I cannot see the picture.", "no"),
        *((said, "yes") for said in ("Yes, nope", "Yes, it is not", "yes is wrong", "Yes? I doubt it")),
        ("At least two dogs", "two dogs"),
        ("two dogs?", "two dogs"),
        ("The person lacks a hat.", "a hat"),
        ("The glass is hardly full.", "full"),
        ("Is it raining?", "no"),
        ("", "yes"),
        ("", "red"),
        ("I see a car.", "I"),
        ("The lamp is on the table.", "on"),
        ("There are colourful decorations in the vase.", "The flower bouquet is in the vase."),
        ("in it", "The vase is in it."),
        ("The dog is behind the cat.", "The cat is behind the dog."),
        ("The cat is not behind the dog.", "The cat is behind the dog."),
        ("The date is 12-2-88.", "2-2-88"),
        ("From 10:30 to 11:00.", "10:30"),
        ("The magazine is no. 111.", "no. 110"),
        ("The picture shows " + "one more thing " * 15 + "red", "red"),
        ("one " * 10, "one " * 41),
    ],
)
def test_wrong_words(answer: str, gold: str) -> None:
    assert not judge(answer, gold).right


def test_long_answers_explain() -> None:
    """They share half of their words with the right one, and deny as often."""
    gold = (
        "She is near the road and should not block the sign, so that drivers see it well and stop in time for her. " * 2
    )
    assert [rule_of("word " * count) for count in (30, 31)] == ["words", "text"]
    assert judge(gold.replace("time", "good time").replace("well", "clearly"), gold).right
    assert not judge("She should not block the sign.", gold).right
    assert not judge(gold.replace("not ", "", 1), gold).right
    assert not judge(gold.replace("is near", "is not near", 1), gold).right


@given(PLAIN, COLOURS)
def test_what_is_stated_is_right(sentence: str, gold: str) -> None:
    assert judge(sentence.format(gold), gold).right


@given(AGAINST, COLOURS)
def test_what_is_denied_or_one_of_several_is_wrong(sentence: str, gold: str) -> None:
    assert not judge(sentence.format(gold), gold).right


@given(
    PLAIN | AGAINST | st.sampled_from(["No, {}", "option b, {}", "The answer is A {}", "There are three {}"]),
    st.sampled_from(["red", "dark blue", "No", "B", "3", "three", "The car is red."]),
    st.sampled_from([str.upper, str.lower, str.swapcase, str.title]),
    st.sampled_from([" ", "  ", "\t", "\u00a0"]),
)
def test_case_and_white_space_change_nothing(sentence: str, gold: str, change: object, space: str) -> None:
    assert callable(change)
    answer = sentence.format(gold)
    assert judge(f" {change(answer)} ".replace(" ", space), gold).right == judge(answer, gold).right


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_texts_are_judged(answer: str, gold: str) -> None:
    assert judge(answer, gold).right in (True, False)
