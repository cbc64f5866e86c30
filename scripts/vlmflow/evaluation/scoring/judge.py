"""Whether an answer is right, by the rule that its gold answer calls for."""

import msgspec
from rapidfuzz.distance import Levenshtein

from vlmflow.evaluation.scoring.answer_text import normalised
from vlmflow.evaluation.scoring.numbers import is_number, numbers_in, read_number, same_number
from vlmflow.evaluation.scoring.options import option_in, option_of, options_named
from vlmflow.evaluation.scoring.results import Rule

ANLS_FROM = 0.5
"""Texts that differ in half of their characters or more have an ANLS of 0 (arXiv:1905.13648)."""


class Judgement(msgspec.Struct, frozen=True):
    """One answer against the gold answer.

    right: exact, or by the rule of the gold answer. exact: equal after normalisation. anls: likeness of the characters,
    0 to 1.
    """

    right: bool
    exact: bool
    anls: float


def rule_of(gold: str) -> Rule:
    """Return the rule by which answers are compared with a gold answer."""
    if option_of(gold):
        return "option"
    return "number" if read_number(gold) else "text"


def judge(answer: str, gold: str) -> Judgement:
    """Compare an answer with the gold answer. Both are answers, not turns (see `answer_in`)."""
    exact = normalised(answer) == normalised(gold)
    right = False
    if option := option_of(gold):
        right = option_in(answer) == option
    elif number := read_number(gold):
        right = is_number(answer, number)
    return Judgement(exact or right, exact, anls(answer, gold))


def anls(answer: str, gold: str) -> float:
    """Return the likeness of two answers: 1 - d / n, with d their Levenshtein distance and n the longer length.

    Case and white space at the ends do not count. 0 from d / n = 0.5 on; equal texts have 1.
    """
    given, right = answer.strip().lower(), gold.strip().lower()
    longest = max(len(given), len(right))
    if not longest:
        return 1.0
    likeness = 1 - Levenshtein.distance(given, right) / longest
    return likeness if likeness > ANLS_FROM else 0.0


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
