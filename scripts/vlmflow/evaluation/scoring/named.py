"""Metrics with a name, as the code of their owners computes them; compared with its values in the tests.

Each compares one answer with one gold answer: where an owner takes the best of several, this is that gold's value.
"""

import re
import string
from collections import Counter

from rapidfuzz.distance import Levenshtein

ANLS_FROM = 0.5
"""A lower likeness counts as 0: DocVQA's threshold."""

RELAXED = 0.05
"""The share of the gold number by which ChartQA lets an answer differ."""

SQUAD_ARTICLES = re.compile(r"\b(a|an|the)\b")

SQUAD_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(answer: str, gold: str) -> bool:
    """Return SQuAD's exact match: equal without case, ASCII punctuation, articles and extra white space.

    From `compute_exact` of its evaluation script 2.0 (arXiv:1806.03822). transformers has this function and the next,
    in a module that imports torch.
    """
    return _squad_words(answer) == _squad_words(gold)


def token_f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1 of the words that two answers share, 0 to 1 (`compute_f1`, as above)."""
    given, right = _squad_words(answer), _squad_words(gold)
    if not given or not right:
        return float(given == right)
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right))


def anls(answer: str, gold: str) -> float:
    """Return DocVQA's likeness of the characters: 1 - d / n, or 0 below one half; d is their Levenshtein distance.

    Case and extra white space do not count in d, but white space does in n, the longer length. From the script of the
    Robust Reading Competition (rrc.cvc.uab.es, challenge 17), which keeps a likeness of just one half; the paper
    (arXiv:1907.00490) does not. Its name is a mean's: average normalised Levenshtein similarity.
    """
    distance = Levenshtein.distance(*(" ".join(text.lower().split()) for text in (answer, gold)))
    longest = max(len(answer.upper()), len(gold.upper()))
    likeness = 1 - (distance / longest if longest else 0.0)
    return likeness if likeness >= ANLS_FROM else 0.0


def relaxed_accuracy(answer: str, gold: str) -> bool:
    """Return whether ChartQA takes an answer: a number within 5 % of the gold one, or an equal text without case.

    42% is 0.42. Nothing but digits is a number: "$5" and "5 m" are texts, as are all answers where the gold one is 0.
    From `relaxed_correctness` of google-research/pix2struct, after arXiv:2203.10244, section 5.1.
    """
    given, right = _chart_number(answer), _chart_number(gold)
    if given is None or not right:
        return answer.lower() == gold.lower()
    return abs(given - right) / abs(right) <= RELAXED


def _squad_words(text: str) -> list[str]:
    return SQUAD_ARTICLES.sub(" ", text.lower().translate(SQUAD_PUNCTUATION)).split()


def _chart_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
