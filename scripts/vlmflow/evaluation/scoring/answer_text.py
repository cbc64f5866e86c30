"""The answer in a turn's text, and the form in which two equal answers are equal."""

import unicodedata

from vlmflow.rows.answer_mark import after_mark

DECORATION = "*_`#"
"""Marks of Markdown around an answer."""

MOST_CHARACTERS = 10_000
"""Of a longer text only the end counts, where the answer is."""

ARTICLES = frozenset({"a", "an", "the"})

APOSTROPHES = frozenset("'’ʼ")

KEPT_MARKS = frozenset("%")
"""Punctuation with a meaning of its own."""

HYPHENS = frozenset("-\N{MINUS SIGN}")

MARKS = {",": " , ", "/": " / ", "&": " and ", "?": " ? . ", **dict.fromkeys(".!;:\n", " . ")}
"""Punctuation that parts what a text says: its parts are tokens of their own."""

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)

TENS = "twenty thirty forty fifty sixty seventy eighty ninety"

NUMBER_WORDS = {word: str(number) for number, word in enumerate(ONES.split())} | {
    word: str(10 * number) for number, word in enumerate(TENS.split(), start=2)
}
"""Numbers of one word."""


def answer_in(text: str) -> str:
    """Return the text after the last `Answer:`, or the whole text without one; "" if nothing follows."""
    text = text[-MOST_CHARACTERS:]
    after = after_mark(text)
    return (text if after is None else after).strip().strip(DECORATION).strip()


def normalised(answer: str) -> str:
    """Return an answer without case, punctuation, articles and extra white space.

    Letters are folded as Unicode's compatibility caseless match does (Unicode Standard, 3.13, D146). Symbols (category
    S), accents, %, and minus and decimal point of a number stay. An answer of nothing but punctuation or articles stays
    as it is.
    """
    folded = _folded(answer)
    words = "".join(_without_mark(folded, place) for place in range(len(folded))).split()
    kept = [word for word in words if word not in ARTICLES] or words
    return unicodedata.normalize("NFKD", " ".join(kept)) or " ".join(folded.split())


def tokens_of(text: str) -> list[str]:
    """Return the words of a text as in `normalised`, with numbers as digits, and its marks: ",", "/", "." and "?".

    "&" is "and"; a "." follows each "?"; marks between digits are none.
    """
    folded = _folded(text)
    parts = [_with_mark(folded, place) for place in range(len(folded))]
    words = unicodedata.normalize("NFKD", "".join(parts)).split()
    return [NUMBER_WORDS.get(word, word) for word in words if word not in ARTICLES]


def _folded(text: str) -> str:
    """Return a text in one case and form, without apostrophes and characters that are not seen."""
    visible = "".join(one for one in text if one not in APOSTROPHES and unicodedata.category(one) != "Cf")
    for _ in range(2):
        visible = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", visible).casefold())
    return visible


def _without_mark(text: str, place: int) -> str:
    """Return a character, or the space that normalisation puts in the place of punctuation."""
    character = text[place]
    if character in HYPHENS:
        after, before = text[place + 1 : place + 2], text[place - 1 : place]
        return "-" if after.isdigit() and not before.isalnum() else " "
    if character == "." and text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit():
        return character
    return " " if character not in KEPT_MARKS and unicodedata.category(character)[0] == "P" else character


def _with_mark(text: str, place: int) -> str:
    """Return a character, the token of a mark, or the space in the place of other punctuation."""
    kept = _without_mark(text, place)
    between_digits = text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit()
    return MARKS.get(text[place], kept) if kept.isspace() and not between_digits else kept
