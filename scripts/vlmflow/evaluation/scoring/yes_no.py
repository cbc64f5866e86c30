"""Answers to a question that yes or no answers, alone or before a sentence."""

import re

from vlmflow.evaluation.scoring.answer_text import tokens_of
from vlmflow.evaluation.scoring.stated import MARKS

ALONE = re.compile(r"\s*(?P<word>yes|no)[\s.!]*(?:[,;].*)?", re.IGNORECASE | re.DOTALL)
"""Yes, or "Yes, the armchair is gray."; not "No. 110" nor "No parking"."""

NO_ANSWERS = (["no", "doubt"], ["no", "question"], ["no", "problem"])
"""Beginnings that say neither yes nor no: "No doubt, it is open."."""


def yes_or_no(gold: str) -> str | None:
    """Return the yes or no that a right answer is, or begins with before a comma; None if it is anything else."""
    found = ALONE.fullmatch(gold)
    return found["word"].lower() if found else None


def says(answer: str) -> str | None:
    """Return the yes or no with which an answer begins; None if it begins otherwise or says the other one too."""
    tokens = tokens_of(answer)
    if not tokens or tokens[0] not in ("yes", "no") or tokens[:2] in NO_ANSWERS:
        return None
    alone = [
        word
        for before, word, after in zip([".", *tokens], tokens, [*tokens[1:], "."], strict=False)
        if word == "yes" or (word == "no" and (before in ("or", "/") or after in MARKS))
    ]
    return tokens[0] if {*alone, tokens[0]} == {tokens[0]} else None
