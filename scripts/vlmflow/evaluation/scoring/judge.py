"""Metrics with a name, as the code of their owners computes them; compared with its values in the tests.

Each compares one answer with one gold answer: where an owner takes the best of several, this is that gold's value.

How good an answer is: by our rule for its gold answer, and by metrics with a name.
"""

import re
import string
from collections import Counter

import msgspec
from rapidfuzz.distance import Levenshtein

from vlmflow.evaluation.scoring.answer_forms import (
    is_number,
    numbers_in,
    option_in,
    option_of,
    options_named,
    read_number,
    same_number,
    says,
    yes_or_no,
)
from vlmflow.evaluation.scoring.stated import Rule, denials, normalised, states

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


FEW_WORDS = 30
"""A longer gold answer explains something: no good answer has all of its words."""

SHARED = 0.5
"""From this token F1 on an answer is like an explanation; of FIRE's train rows, those scored 1 to 4 reach 0.28."""


class Judgement(msgspec.Struct, frozen=True):
    """One answer against the gold answer.

    right: by our own rule for the gold answer. The others are those of `named`: SQuAD's exact match and F1, DocVQA's
    ANLS, ChartQA's relaxed accuracy.
    """

    right: bool
    exact_match: bool
    token_f1: float
    anls: float
    relaxed_accuracy: bool


def rule_of(gold: str) -> Rule:
    """Return our rule by which answers are right for a gold answer."""
    if option_of(gold):
        return "option"
    if read_number(gold):
        return "number"
    if yes_or_no(gold):
        return "yes_no"
    return "words" if len(gold.split()) <= FEW_WORDS else "text"


def judge(answer: str, gold: str) -> Judgement:
    """Compare an answer with the gold answer. Both are answers, not turns (see `answer_in`)."""
    return Judgement(
        right=answer == gold or _says_the_same(answer, gold) or _follows_rule(answer, gold),
        exact_match=exact_match(answer, gold),
        token_f1=token_f1(answer, gold),
        anls=anls(answer, gold),
        relaxed_accuracy=relaxed_accuracy(answer, gold),
    )


def holds(feedback: str, gold: str) -> bool:
    """Return whether feedback gives the gold answer away: it names the option, the number, or the normalised text.

    Words must be whole. A short answer, such as "no", may be there by chance.
    """
    if option := option_of(gold):
        return option in options_named(feedback)
    if number := read_number(gold):
        return any(same_number(found, number) for found in numbers_in(feedback))
    wanted = normalised(gold)
    return bool(wanted) and f" {wanted} " in f" {normalised(feedback)} "


def _says_the_same(answer: str, gold: str) -> bool:
    """Return whether two texts are equal but for their form; one that asks says nothing, and of options "A" is one."""
    asks = "?" in answer and "?" not in gold
    return not asks and not option_of(gold) and normalised(answer) == normalised(gold)


def _follows_rule(answer: str, gold: str) -> bool:
    """Return whether an answer that is not equal to the gold one is right by its rule."""
    if option := option_of(gold):
        return option_in(answer) == option
    if number := read_number(gold):
        return is_number(answer, number)
    if word := yes_or_no(gold):
        return says(answer) == word
    if rule_of(gold) == "words":
        return states(answer, gold)
    return token_f1(answer, gold) >= SHARED and denials(answer) == denials(gold)
