"""Numbers in answers: digits with thousands separators, sign, per cent and unit; words such as "three" are texts."""

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}(?![0-9])|[0-9]{1,20})(?:\.[0-9]{1,20})?|\.[0-9]{1,20}"
"""Digits, as 1234.5, 1,234.5 or .5; bounded, so that no text takes long."""

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words after a number that multiply it."""

SCALE = rf"(?: (?P<scale>(?i:{'|'.join(SCALES)}))(?![^\W_]))?"

SYMBOLS = "mm cm dm km nm ft yd mi in mg kg lbs? oz ml cl dl ms secs? mins? hrs? [kmgt]b [kmg]?hz kwh? mph kph m/s"
"""Units that may follow digits without a space, in any case."""

SYMBOL = rf"(?:%|°[CF]?|(?:(?i:{'|'.join(SYMBOLS.split())}|km/?h|px|fps|rpm|am|pm|percent)|[mghlLVW])(?![^\W_]))"
"""The same, with single letters. All else makes digits part of a name: 7up, 16th, 3D, 1990s, 5A; so does $5m."""

UNIT = r"per cent|[^\W\d_][^\s\d]{0,14}|°[CF]?|%"
"""After a space: one word, horses or km/h, or %."""

ALONE = re.compile(
    rf"(?P<before>[$€£¥])? ?(?P<sign>[-+]?) ?(?P<after>[$€£¥])?(?P<digits>{DIGITS}){SCALE}"
    rf"(?: (?P<unit>{UNIT})|(?(before)(?!)|(?(after)(?!)|(?P<symbol>{SYMBOL}))))?\.?"
)
"""An answer that is a number: with a currency before it, or a unit after it."""

INSIDE = re.compile(
    rf"(?<![\w.,/])(?<![0-9]:)(?:(?<=[$€£¥])(?P<price>)|(?<![$€£¥]))(?P<sign>[-+]?)(?P<digits>{DIGITS})"
    rf"(?![.,:/]?[0-9])(?:(?![^\W_])|(?(price)(?!)|(?={SYMBOL}))){SCALE}(?P<percent> ?%)?"
)
"""A number in a sentence. B2, 10:30, 1/2, 1.2.3 and 16th hold none."""

PER_CENT = frozenset({"%", "percent", "per cent", "percentage"})

LEAST, SHARE = Decimal("0.01"), Decimal("0.005")
"""A number with decimal places may differ by LEAST, or by this share of the right one, if that is more."""


@dataclass(frozen=True)
class Number:
    """value: the number. whole: written without decimal places. unit: in lower case, "" if there is none."""

    value: Decimal
    whole: bool
    unit: str = ""


def read_number(answer: str) -> Number | None:
    """Return the number that an answer is, with its unit; None if it is anything else, as a sentence."""
    found = ALONE.fullmatch(_plain(answer))
    if not found:
        return None
    unit = (found["unit"] or found["symbol"] or "").strip().rstrip(".").strip().casefold()
    return _number(found, "%" if unit in PER_CENT else unit)


def numbers_in(text: str) -> list[Number]:
    """Return all numbers in a text, without their units."""
    return [_number(found, "%" if found["percent"] else "") for found in INSIDE.finditer(_plain(text))]


def is_number(answer: str, right: Number) -> bool:
    """Return whether an answer gives the right number.

    It is the number, or a sentence with this number and no other. Units must agree if both answers are number and unit.
    """
    alone = read_number(answer)
    if alone:
        units_agree = not (alone.unit and right.unit) or _singular(alone.unit) == _singular(right.unit)
        return units_agree and same_number(alone, right)
    found = numbers_in(answer)
    return len({number.value for number in found}) == 1 and same_number(found[0], right)


def same_number(given: Number, right: Number) -> bool:
    """Return whether a number is the right one: equal to a whole number, or near enough to one with decimal places.

    A year or a count is right or wrong; a measure is rounded.
    """
    allowed = Decimal(0) if right.whole else max(LEAST, SHARE * abs(right.value))
    return abs(given.value - right.value) <= allowed


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").strip()


def _number(found: re.Match[str], unit: str) -> Number:
    digits = found["digits"].replace(",", "")
    scale = SCALES[found["scale"].lower()] if found["scale"] else 1
    return Number(Decimal(found["sign"] + digits) * scale, "." not in digits, unit)


def _singular(unit: str) -> str:
    return unit.removesuffix("s")
