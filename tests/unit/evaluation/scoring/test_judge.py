"""Answers are taken out of texts and compared with the gold answer by rules."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.evaluation.scoring.answer_forms import option_in
from vlmflow.evaluation.scoring.judge import holds, judge, rule_of
from vlmflow.evaluation.scoring.stated import MOST_CHARACTERS, answer_in, normalised

TEXTS = st.text(max_size=60) | st.text("aA bB.(),-'0123456789%:$é́İß​", max_size=40)

HOSTILE = {
    "digits": "9" * 250_000,
    "separators": "1," * 125_000,
    "letters and digits": "1a" * 125_000,
    "marks": "Answer:" * 37_500,
    "letters": "Option " * 37_500,
    "brackets": "(" * 250_000,
    "spaces": "answer" + " " * 250_000,
    "combining": "a" + "\u0301\u0327" * 125_000,
    "one character that becomes eighteen": "\ufdfa" * 75_000,
    "alternating": "ab" * 125_000,
    "words": "a red car, " * 25_000,
    "denials": "not red. " * 25_000,
    "numbers": "three 6 " * 25_000,
    "answers": "yes, no " * 25_000,
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Thought: I look.\nAnswer: deductible\n\n", "deductible"),
        ("Answer: no, wait.\nAnswer: yes", "yes"),
        ("The final answer : **B**", "B"),
        ("ANSWER：六", "六"),
        ("A red car.", "A red car."),
        ("Thought: it is cut off.\nAnswer:", ""),
        ("x" * MOST_CHARACTERS + "Answer: 6", "6"),
    ],
)
def test_the_answer_is_what_follows_the_last_mark(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Red  car.", "red car"),
        ("ＦＩＲＥ", "fire"),
        ("Straße", "STRASSE"),
        ("cafe\u0301", "café"),
        ("don’t", "dont"),
        ("well-known", "well known"),
        ("zero\u200bwidth", "zerowidth"),
        ("−5 degrees", "-5 degrees"),
        ("a\u00a0b\tc", "a b c"),
    ],
)
def test_equal_after_normalisation(one: str, other: str) -> None:
    assert judge(one, other).right


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "the"),
        ("3.5", "35"),
        ("1.5 m", "1 5 m"),
        ("-5 C", "5 C"),
        ("?", "!"),
        ("5% of", "5 of"),
        ("", "a"),
        ("é", "e"),
    ],
)
def test_different_after_normalisation(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


@pytest.mark.parametrize("gold", ["B", "(B)", "B.", "Option B", "[B]", "B)", "option (B)"])
@pytest.mark.parametrize(
    "answer",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "Option B",
        "option b",
        "B. a red car",
        "(B) a red car",
        "B: red",
        "The correct option is (B).",
        "The option is B, not C.",
        "the answer is b because it fits",
        "B. No",
        "No, option B is correct.",
    ],
)
def test_options(gold: str, answer: str) -> None:
    assert rule_of(gold) == "option"
    assert judge(answer, gold).right
    assert not judge(answer, gold.replace("B", "C")).right


@pytest.mark.parametrize(
    "answer",
    [
        *("A red car", "It is A or B", "answer A car", "The answer is A car.", "THE ANSWER IS A CAR.", "", "G", "AB"),
        *("A, B and C are all wrong", "A, however, is wrong", "(A) and (B) are wrong", "(A) is wrong", "A. B. C."),
        *("Option A or option B", "The answer is A or B.", "A. red or B. blue", "Option A and option B"),
        *("It is not option A.", "I don't think the answer is A.", "Option A is wrong.", "Option A. No, option B."),
        *("(A) red (B) blue", "A) red D) blue", "A. The answer is B", "A. No, C", "A. Actually C", "A. wrong", "A, B"),
        *("I rule out option A", "A/B", "A?", "B. No, A"),
        "option A, " * 9,
    ],
)
def test_no_option(answer: str) -> None:
    assert option_in(answer) is None


@pytest.mark.parametrize(
    "gold",
    [
        *("a", "Apple", "A car", "G", "AB", "A. Lincoln", "One Way", "", "10:30", "1,23", "..."),
        *("7up", "16th", "1990s", "3D", "5A", "$5m", "A, B and C", "No. 110", "no parking", "Yesterday", "No one"),
    ],
)
def test_words(gold: str) -> None:
    assert rule_of(gold) == "words"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("6", "6"),
        ("6.0", "6"),
        ("There are 6 horses in the scene.", "6"),
        ("6 horses", "6"),
        ("6", "6 horses"),
        ("6 horse", "6 horses"),
        ("1,234,567", "1234567"),
        ("$1,234.5", "1234.50"),
        ("−5", "-5"),
        ("-5 °C", "-5"),
        ("12 percent", "12%"),
        ("12 per cent", "12 %"),
        ("It is 5 m long.", "5 m"),
        ("about 12% of them", "12%"),
        ("3.149", "3.14"),
        ("1004.9", "1000.0"),
        ("It is 5cm long", "5"),
        ("6 of the 6", "6"),
        ("5 cm", "5cm"),
        ("60km/h", "60 km/h"),
        ("5%", "5 %"),
        ("$5", "5"),
        ("5pm", "5 pm"),
        ("$5 million", "5,000,000"),
        ("It costs 5 million dollars.", "$5 million"),
        ("5.2 Million people", "5200000"),
        ("2 dozen", "24 eggs"),
        (".5", "0.5"),
        ("٦", "٦"),
        ("６", "6"),
        ("There are three skaters.", "3"),
        ("There are 3, too.", "3"),
        ("three", "3"),
        ("3", "Three."),
        ("There is one dog.", "1"),
        ("No, there are 3 of them.", "3"),
        ("0.42", "42%"),
        ("42%", "0.42"),
        ("It is 42%.", "42"),
    ],
)
def test_right_numbers(answer: str, gold: str) -> None:
    assert judge(answer, gold).right


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("7", "6"),
        ("2019", "2020"),
        ("5", "-5"),
        ("3.17", "3.14"),
        ("0.03", "0.02"),
        ("1005.1", "1000.0"),
        ("three", "4"),
        ("three or four", "3"),
        ("The one on the left.", "1"),
        ("No one is there.", "1"),
        ("twenty-one", "20"),
        ("It is not 3.", "3"),
        ("Are there 3?", "3"),
        ("There are more than 3.", "3"),
        ("There are at least three.", "3"),
        ("It holds up to 3.", "3"),
        *((said, "6") for said in ("6?", "6+", ">6", "over 6", "half of 6", "6 and a half", "6 is too low")),
        ("two thirds", "2"),
        ("2 k", "2"),
        ("It is 5 cm.", "5 m"),
        ("There are 3. No, I see more.", "3"),
        ("3 " * 9, "3"),
        ("4.2", "42%"),
        ("0.42%", "42%"),
        ("100%", "1"),
        ("3 or 4", "3"),
        ("3-4", "3"),
        ("5 m", "5 cm"),
        ("5 m", "5%"),
        ("10:30", "30"),
        ("1/2", "2"),
        ("B6", "6"),
        ("1.6.2", "6"),
        ("1,6", "16"),
        ("7up", "7"),
        ("A can of 7up.", "7"),
        ("16th", "16"),
        ("the 16th century", "16"),
        ("the 1990s", "1990"),
        ("3D", "3"),
        ("$5 million", "5"),
        ("It costs 5 million.", "5"),
        ("It costs $5m.", "5"),
        ("", "6"),
        ("9" * 400, "9"),
    ],
)
def test_wrong_numbers(answer: str, gold: str) -> None:
    assert rule_of(gold) == "number"
    assert not judge(answer, gold).right


@pytest.mark.parametrize(
    ("feedback", "gold"),
    [
        ("It is Matching!", "matching"),
        ("Look again: option B is right.", "B"),
        ("Count again, there are 1,000 of them.", "1000"),
        ("the red car, I think", "A red car."),
    ],
)
def test_feedback_that_holds_the_answer(feedback: str, gold: str) -> None:
    assert holds(feedback, gold)


@pytest.mark.parametrize(
    ("feedback", "gold"),
    [
        ("You mismatched it.", "match"),
        ("A better look is needed.", "A"),
        ("It is not option A.", "B"),
        ("There are 10 of them.", "1"),
        ("", "yes"),
        ("anything", ""),
    ],
)
def test_feedback_that_does_not(feedback: str, gold: str) -> None:
    assert not holds(feedback, gold)


@given(TEXTS)
def test_a_text_is_right_for_itself(text: str) -> None:
    assert judge(text, text).right


@given(TEXTS)
def test_normalising_again_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(TEXTS)
def test_composed_and_decomposed_texts_are_equal(text: str) -> None:
    assert normalised(unicodedata.normalize("NFC", text)) == normalised(unicodedata.normalize("NFD", text))


@pytest.mark.lengthy
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_text_takes_long(text: str) -> None:
    """In process time: each of them took under a second here; a search that is quadratic would take hours."""
    began = time.process_time()
    answer = answer_in(text)
    for gold in ("B", "6", "no", "a red car", "The car is red.", "a red car " * 20, answer):
        judge(answer, gold)
        holds(text[-MOST_CHARACTERS:], gold)
    assert time.process_time() - began < 20
