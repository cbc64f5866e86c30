"""Options of a multiple choice: a letter from A to F in its usual forms, in any case."""

import re
import unicodedata

from vlmflow.evaluation.scoring.answer_text import tokens_of
from vlmflow.evaluation.scoring.stated import MOST_STATED, asserted, listed

LETTER = r"(?:[\(\[]\s?(?P<letter>[A-F])\s?[\)\]]|(?P<bare>[A-F]))"

ALONE = re.compile(rf"(?:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?{LETTER}[).:]?\.?", re.IGNORECASE)
"""Nothing but a letter: B, (B), B., B), [b], Option B, answer is B."""

FIRST = re.compile(
    rf"(?:option |choice )?{LETTER}(?:[.:)]\s|(?<=[\])])\s)"
    r"(?!(?:and|or|nor|(?:is|was) (?:not|wrong|incorrect|false))\b|[A-F][.:)] )",
    re.IGNORECASE,
)
"""A letter before its text: B. a red car, (B) a red car, Option B: a red car; no list, as "(A) and (B)"."""

ANOTHER = re.compile(r"(?:\b(?:or|and)|[,;/]) (?:option )?[\(\[]?[A-F][.:)\]]", re.IGNORECASE)
"""One more letter, behind the text of the first: A. red or B. blue."""

CORRECTED = re.compile(
    r"(?:[,;:/.] |\bis |\b(?:a|A)ctually |\b(?:n|N)o,? )[\(\[]?(?:[B-F](?![\w'’])|A(?=\W*$))"
    r"|[\(\[][A-Fa-f][\)\]]|\b[A-F]\)|^(?:wrong|incorrect)\W*$"
)
"""Behind the first letter, what chooses another one, or none: B. No, C; (B) red (C) blue; B. wrong."""

NAMED = re.compile(
    rf"\b(?:option|choice|answer)(?: is)?:? (?:option )?{LETTER}(?![\w'’])"
    r"(?!(?<=\ba) (?!(?:because|since|as|and|or|nor|is|was|not|has|shows)\b)\w)",
    re.IGNORECASE,
)
"""A letter that a sentence names as the answer; in "the answer is a car" it is an article."""


def option_of(gold: str) -> str | None:
    """Return the letter that a right answer is, in capitals; None if it is anything else."""
    found = ALONE.fullmatch(_plain(gold))
    letter = found and (found["letter"] or found["bare"])
    return letter if letter and letter.isupper() else None


def option_in(answer: str) -> str | None:
    """Return the letter that an answer chooses, in capitals; None if it names none, more than one, or denies it."""
    text = _plain(answer)
    if found := ALONE.fullmatch(text):
        return _letter(found)
    if first := FIRST.match(text):
        rest = text[first.end() :]
        return None if ANOTHER.search(rest) or CORRECTED.search(rest) else _letter(first)
    named = list(NAMED.finditer(text))
    if len(named) > MOST_STATED or len(set(map(_letter, named))) != 1:
        return None
    beside = [(tokens_of(text[: found.start()]), tokens_of(text[found.end() :])) for found in named]
    chosen = all(asserted(before, after) and not listed(before, after) for before, after in beside)
    return _letter(named[0]) if chosen else None


def options_named(text: str) -> set[str]:
    """Return all letters that a text names as an option or answer, in capitals."""
    return {_letter(found) for found in NAMED.finditer(_plain(text))}


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).replace("*", "").split())


def _letter(found: re.Match[str]) -> str:
    return (found["letter"] or found["bare"]).upper()
