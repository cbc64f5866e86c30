"""Answers to a question that yes or no answers, alone or before a sentence."""

import re
from itertools import pairwise

from vlmflow.evaluation.scoring.answer_text import tokens_of
from vlmflow.evaluation.scoring.stated import MARKS, word_set

ALONE = re.compile(r"\s*(?P<word>yes|no)[\s.!]*(?:[,;].*)?", re.IGNORECASE | re.DOTALL)
"""Yes, or "Yes, the armchair is gray."; not "No. 110" nor "No parking"."""

FOLLOWS = word_set(", . it its there theres they he she we i you this that these those")
"""What follows a yes or no that answers; another word makes it a part of a sentence: "No doubt, it is open."."""

UNSURE = word_set("cannot cant unable unsure unclear unknown wait actually nope")
"""Words with which an answer takes its yes or no back."""


def yes_or_no(gold: str) -> str | None:
    """Return the yes or no that a right answer is, or begins with before a comma; None if it is anything else."""
    found = ALONE.fullmatch(gold)
    return found["word"].lower() if found else None


def says(answer: str) -> str | None:
    """Return the yes or no with which an answer begins; None if it begins otherwise or says the other one too."""
    tokens = tokens_of(answer)
    if not tokens or tokens[0] not in ("yes", "no") or {*tokens[1:2]} - FOLLOWS or UNSURE & {*tokens}:
        return None
    if tokens[0] == "yes" and ("not", ".") in pairwise([*tokens, "."]):
        return None
    alone = [
        word
        for before, word, after in zip([".", *tokens], tokens, [*tokens[1:], "."], strict=False)
        if word == "yes" or (word == "no" and (before in ("or", "/") or after in MARKS))
    ]
    return tokens[0] if {*alone, tokens[0]} == {tokens[0]} else None
