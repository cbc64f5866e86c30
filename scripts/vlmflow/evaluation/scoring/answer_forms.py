"""Answers to a question that yes or no answers, alone or before a sentence.

Options of a multiple choice: a letter from A to F in its usual forms, in any case.

Numbers in answers: digits with thousands separators, sign, per cent and unit, or a word such as "three".
"""

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from vlmflow.evaluation.scoring.stated import (
    MARK_WORDS,
    MOST_STATED,
    NUMBER_WORDS,
    asserted,
    listed,
    tokens_of,
    word_set,
)

YES_NO_ALONE = re.compile(r"\s*(?P<word>yes|no)[\s.!]*(?:[,;].*)?", re.IGNORECASE | re.DOTALL)
"""Yes, or "Yes, the armchair is gray."; not "No. 110" nor "No parking"."""

FOLLOWS = word_set(", . it its there theres they he she we i you this that these those")
"""What follows a yes or no that answers; another word makes it a part of a sentence: "No doubt, it is open."."""

UNSURE = word_set("cannot cant unable unsure unclear unknown wait actually nope")
"""Words with which an answer takes its yes or no back."""


def yes_or_no(gold: str) -> str | None:
    """Return the yes or no that a right answer is, or begins with before a comma; None if it is anything else."""
    match = YES_NO_ALONE.fullmatch(gold)
    return match["word"].lower() if match else None


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
        if word == "yes" or (word == "no" and (before in ("or", "/") or after in MARK_WORDS))
    ]
    return tokens[0] if {*alone, tokens[0]} == {tokens[0]} else None


LETTER = r"(?:[\(\[]\s?(?P<letter>[A-F])\s?[\)\]]|(?P<bare>[A-F]))"

OPTION_ALONE = re.compile(
    rf"(?:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?{LETTER}[).:]?\.?", re.IGNORECASE
)
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
    match = OPTION_ALONE.fullmatch(_plain_option(gold))
    letter = match and (match["letter"] or match["bare"])
    return letter if letter and letter.isupper() else None


def option_in(answer: str) -> str | None:
    """Return the letter that an answer chooses, in capitals; None if it names none, more than one, or denies it."""
    text = _plain_option(answer)
    if match := OPTION_ALONE.fullmatch(text):
        return _letter(match)
    if first := FIRST.match(text):
        rest = text[first.end() :]
        return None if ANOTHER.search(rest) or CORRECTED.search(rest) else _letter(first)
    named = list(NAMED.finditer(text))
    if len(named) > MOST_STATED or len(set(map(_letter, named))) != 1:
        return None
    beside = [(tokens_of(text[: match.start()]), tokens_of(text[match.end() :])) for match in named]
    chosen = all(asserted(before, after) and not listed(before, after) for before, after in beside)
    return _letter(named[0]) if chosen else None


def options_named(text: str) -> set[str]:
    """Return all letters that a text names as an option or answer, in capitals."""
    return {_letter(match) for match in NAMED.finditer(_plain_option(text))}


def _plain_option(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).replace("*", "").split())


def _letter(match: re.Match[str]) -> str:
    return (match["letter"] or match["bare"]).upper()


DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}(?![0-9])|[0-9]{1,20})(?:\.[0-9]{1,20})?|\.[0-9]{1,20}"
"""Digits, as 1234.5, 1,234.5 or .5; bounded, so that no text takes long."""

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words after a number that multiply it."""

SCALE = rf"(?: (?P<scale>(?i:{'|'.join(SCALES)}))(?![^\W_]))?"

SYMBOLS = "mm cm dm km nm ft yd mi in mg kg lbs? oz ml cl dl ms secs? mins? hrs? [kmgt]b [kmg]?hz kwh? mph kph m/s"
"""Units that may follow digits without a space, in any case."""

SYMBOL = rf"(?:%|°[CF]?|(?:(?i:{'|'.join(SYMBOLS.split())}|km/?h|px|fps|rpm|am|pm|percent)|[mghlLVW])(?![^\W_]))"
"""Units that may follow digits without a space, with single letters. All else makes digits part of a
name: 7up, 16th, 3D, 1990s, 5A; so does $5m."""

UNITS = word_set("mm cm dm m km nm ft yd mi mg g kg lb lbs oz ml cl dl l")
"""Units that a sentence may give after a number; others are words."""

UNIT = r"per cent|[^\W\d_][^\s\d]{0,14}|°[CF]?|%"
"""After a space: one word, horses or km/h, or %."""

NUMBER_ALONE = re.compile(
    rf"(?P<before>[$€£¥])? ?(?P<sign>[-+]?) ?(?P<after>[$€£¥])?(?P<digits>{DIGITS}){SCALE}"
    rf"(?: (?P<unit>{UNIT})|(?(before)(?!)|(?(after)(?!)|(?P<symbol>{SYMBOL}))))?\.?"
)
"""An answer that is a number: with a currency before it, or a unit after it."""

INSIDE = re.compile(
    rf"(?<![\w.,/])(?<![0-9]:)(?:(?<=[$€£¥])(?P<price>)|(?<![$€£¥]))(?P<sign>[-+]?)(?P<digits>{DIGITS})"
    rf"(?![.,:/]?[0-9])(?:(?![^\W_])|(?(price)(?!)|(?={SYMBOL}))){SCALE}(?P<percent> ?%)?"
)
"""A number in a sentence. B2, 10:30, 1/2, 1.2.3 and 16th hold none."""

WORD = re.compile(
    rf"(?<![\w-])(?:(?<!the )(?<!this )(?<!that )(?<!which )(?<!no )(?<!any )(?<!every )(?<!each )one|"
    rf"{'|'.join(word for word in NUMBER_WORDS if word != 'one')})(?![\w-])",
    re.IGNORECASE,
)
"""A number of one word; "the one" and "no one" are none, nor is "one-way"."""

NOT_ITSELF = word_set("over under above below before after beyond minus nearly almost half")
"""Before a number, they say that another one is meant: over 6, half of 6."""

PARTS = word_set("thirds quarters fifths tenths hundredths k")
"""After a number, they say so: two thirds, 2 k, "6 is too low"."""

COMPARED = re.compile(r"[<>≤≥~]\s*$")

PER_CENT = frozenset({"%", "percent", "per cent", "percentage"})

HUNDRED = Decimal(100)

LEAST, MOST, SHARE = Decimal("0.01"), Decimal("0.05"), Decimal("0.005")
"""A number with decimal places may differ by LEAST, if that is at most MOST of the right one, or by a SHARE of it."""


@dataclass(frozen=True)
class Number:
    """value: the number. whole: written without decimal places. unit: in lower case, "" if there is none."""

    value: Decimal
    whole: bool
    unit: str = ""


def read_number(answer: str) -> Number | None:
    """Return the number that an answer is, with its unit; None if it is anything else, as a sentence or "one way"."""
    text = _plain_number(answer)
    match = NUMBER_ALONE.fullmatch(NUMBER_WORDS.get(text.rstrip(".").casefold(), text))
    if not match:
        return None
    unit = (match["unit"] or match["symbol"] or "").strip().rstrip(".").strip().casefold()
    return _number(match, "%" if unit in PER_CENT else unit)


def numbers_in(text: str) -> list[Number]:
    """Return all numbers in a text, without their units but per cent."""
    return [_inside(match) for match in INSIDE.finditer(_digits(text))]


def is_number(answer: str, right: Number) -> bool:
    """Return whether an answer gives the right number.

    It is the number, or a sentence that states this number and has no other. Units must agree if both answers are
    number and unit.
    """
    alone = read_number(answer)
    if alone:
        units_agree = not (alone.unit and right.unit) or _singular(alone.unit) == _singular(right.unit)
        return units_agree and alone.unit not in PARTS and same_number(alone, right)
    text = _digits(answer)
    stated = list(INSIDE.finditer(text))
    return (
        len({_inside(match).value for match in stated}) == 1
        and len(stated) <= MOST_STATED
        and same_number(_inside(stated[0]), right)
        and all(_is_said(text, match, right) for match in stated)
    )


def _is_said(text: str, match: re.Match[str], right: Number) -> bool:
    """Return whether a text says that a number in it is the answer: itself, in the same unit if both have one."""
    before, after = tokens_of(text[: match.start()]), tokens_of(text[match.end() :])
    last = [word for word in before[-2:] if word != "of"][-1:]
    following = after[:1]
    other_unit = right.unit and following and following[0] in UNITS and _singular(following[0]) != _singular(right.unit)
    return not (
        other_unit
        or NOT_ITSELF & {*last}
        or PARTS & {*after[:2]}
        or after[:2] in (["and", "half"], ["is", "too"])
        or text[match.end() : match.end() + 1] == "+"
        or COMPARED.search(text[: match.start()])
    ) and asserted(before, after)


def same_number(given: Number, right: Number) -> bool:
    """Return whether a number is the right one: equal to a whole number, or near enough to one with decimal places.

    A year or a count is right or wrong; a measure is rounded. 42 % is 0.42, and 42 where one of both has no unit.
    """
    allowed = Decimal(0) if right.whole else max(min(LEAST, MOST * abs(right.value)), SHARE * abs(right.value))
    values = {given.value}
    if given.unit == "%" != right.unit and not right.whole:
        values.add(given.value / HUNDRED)
    elif right.unit == "%" != given.unit and not given.whole:
        values.add(given.value * HUNDRED)
    return any(abs(value - right.value) <= allowed for value in values)


def _plain_number(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").strip()


def _digits(text: str) -> str:
    return WORD.sub(lambda match: NUMBER_WORDS[match[0].lower()], _plain_number(text))


def _number(match: re.Match[str], unit: str) -> Number:
    digits = match["digits"].replace(",", "")
    scale = SCALES[match["scale"].lower()] if match["scale"] else 1
    return Number(Decimal(match["sign"] + digits) * scale, "." not in digits, unit)


def _inside(match: re.Match[str]) -> Number:
    return _number(match, "%" if match["percent"] else "")


def _singular(unit: str) -> str:
    return unit.removesuffix("s")
