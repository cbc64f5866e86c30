"""Options of a multiple choice: a letter from A to F in its usual forms."""

import re
import unicodedata

LETTER = r"(?:[\(\[]\s?(?P<{name}>[{letters}])\s?[\)\]]|(?P<{name}_bare>[{letters}]))"

ALONE = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?"
    + LETTER.format(name="letter", letters="A-Fa-f")
    + r"[).:]?\.?",
    re.IGNORECASE,
)
"""Nothing but a letter: B, (B), B., B), [b], Option B, answer is B."""

FIRST = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?"
    + LETTER.format(name="letter", letters="A-F")
    + r"(?:[.:)]\s|(?<=[\])])\s)(?!(?:and|or|nor)\b)"
)
"""A capital letter before its text: B. a red car, (B) a red car, Option B: a red car; no list, as "(A) and (B)"."""

NAMED = re.compile(
    r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)(?: is)?:? (?:[Oo]ption )?"
    + LETTER.format(name="letter", letters="A-F")
    + r"(?![\w'’])"
)
"""A capital letter that a sentence names as the answer; "answer A car" names none."""


def option_of(gold: str) -> str | None:
    """Return the letter that a right answer is, in capitals; None if it is anything else."""
    found = ALONE.fullmatch(_plain(gold))
    letter = found and _letter(found)
    return letter if letter and letter.isupper() else None


def option_in(answer: str) -> str | None:
    """Return the letter that an answer chooses; None if it names none, or more than one."""
    text = _plain(answer)
    for found in (ALONE.fullmatch(text), FIRST.match(text)):
        if found:
            return _letter(found).upper()
    return next(iter(letters)) if len(letters := options_named(text)) == 1 else None


def options_named(text: str) -> set[str]:
    """Return all letters that a text names as an option or answer."""
    return {_letter(found) for found in NAMED.finditer(_plain(text))}


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).replace("*", "").split())


def _letter(found: re.Match[str]) -> str:
    return found["letter"] or found["letter_bare"]
