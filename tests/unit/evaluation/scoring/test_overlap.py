"""Scores of words: BLEU and CIDEr as in pycocoevalcap 1.2, SQuAD's as in the script's copy in transformers.

For the same words, by BleuScorer with "closest" and CiderScorer.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

from vlmflow.evaluation.scoring.judge import cider, exact_match, overlap, token_f1, words_of

TEXTS = [
    "there are 6 horses in the scene",
    "yes the container is made of wicker",
    "the word is matching the word is matching",
    "a red car a red car on the road",
]
REFERENCES = [
    "there are 5 horses in the scene near the road",
    "yes it is made of wicker",
    "matching",
    "the red car is on the road",
]
BLEU = [0.548387097, 0.450673199, 0.353445028, 0.261102185]
CIDER = 2.939145914


def test_the_values_of_the_authors_code() -> None:
    found = overlap(TEXTS, REFERENCES)
    assert found.answers == 4
    assert found.bleu == pytest.approx(BLEU, abs=1e-6)
    assert found.cider == pytest.approx(CIDER, abs=1e-6)


def test_equal_texts_have_the_highest_values() -> None:
    found = overlap(REFERENCES[:2] + REFERENCES[3:], REFERENCES[:2] + REFERENCES[3:])
    assert found.bleu == [1.0] * 4
    assert found.cider == pytest.approx(10.0)


def test_the_idf_comes_from_the_set_at_hand() -> None:
    """So the same answer has another value in another set, and one answer alone has none."""
    more = cider([text.split() for text in TEXTS], [text.split() for text in REFERENCES])
    fewer = cider([text.split() for text in TEXTS[:2]], [text.split() for text in REFERENCES[:2]])
    assert more != pytest.approx(fewer)
    assert cider([TEXTS[0].split()], [REFERENCES[0].split()]) is None


def test_nothing_in_common() -> None:
    found = overlap(["", ""], ["a red car", "a blue car"])
    assert (found.bleu, found.cider) == ([0.0] * 4, 0.0)


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of("Yes, it's the CAR (red)!") == ["yes", "it", "'s", "the", "car", "red"]


@given(st.lists(st.tuples(st.text(max_size=30), st.text(max_size=30)), min_size=2, max_size=5), st.randoms())
def test_order_and_range(pairs: list[tuple[str, str]], shuffle: random.Random) -> None:
    found = overlap([text for text, _ in pairs], [reference for _, reference in pairs])
    shuffle.shuffle(pairs)
    again = overlap([text for text, _ in pairs], [reference for _, reference in pairs])
    assert all(0 <= value <= 1 for value in found.bleu)
    assert 0 <= (found.cider or 0) <= 10
    assert again.cider == pytest.approx(found.cider, abs=1e-5)
    assert again.bleu == pytest.approx(found.bleu, abs=1e-5)


WORDS = st.lists(st.sampled_from(["a", "The", "red", "Red.", "cat", "don't", "é", "12", " ", "—"]), max_size=8)

ANY_TEXTS = st.text(max_size=30) | WORDS.map(" ".join)


@given(ANY_TEXTS, ANY_TEXTS)
def test_the_values_of_transformers(answer: str, gold: str) -> None:
    assert exact_match(answer, gold) == compute_exact(gold, answer)
    assert abs(token_f1(answer, gold) - compute_f1(gold, answer)) < 1e-12
