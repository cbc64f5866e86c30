"""How good an answer is: by our rule for its gold answer, and by metrics with a name."""

import msgspec

from vlmflow.evaluation.scoring.answer_text import normalised
from vlmflow.evaluation.scoring.named import anls, exact_match, relaxed_accuracy, token_f1
from vlmflow.evaluation.scoring.numbers import is_number, numbers_in, read_number, same_number
from vlmflow.evaluation.scoring.options import option_in, option_of, options_named
from vlmflow.evaluation.scoring.results import Rule
from vlmflow.evaluation.scoring.stated import denials, states
from vlmflow.evaluation.scoring.yes_no import says, yes_or_no

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
