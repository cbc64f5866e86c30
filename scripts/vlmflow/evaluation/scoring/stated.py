"""What scoring says of answers, apart from its libraries: pages are drawn where these are not installed.

The answer in a turn's text, and the form in which two equal answers are equal.

Whether a text states some words as its only answer: our own rules, made on FIRE's train rows (see `judge`).
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from vlmflow.rows.chat import after_mark

Rule = Literal["option", "number", "yes_no", "words", "text"]
"""Our rules by which answers are compared with a gold answer."""


class Overlap(msgspec.Struct, frozen=True):
    """Words that answers share with their references. answers: how many. bleu: BLEU-1 to BLEU-4 of all answers.

    cider: the mean CIDEr-D; null for fewer than two answers.
    """

    answers: int
    bleu: list[float]
    cider: float | None


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One answer against the gold answer.

    right: by our own rule for the gold answer. The others have names: SQuAD's exact match and F1, DocVQA's ANLS,
    ChartQA's relaxed accuracy.
    """

    right: bool
    exact_match: bool
    token_f1: float
    anls: float
    relaxed_accuracy: bool


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
    words = "".join(_without_mark(folded, index) for index in range(len(folded))).split()
    kept = [word for word in words if word not in ARTICLES] or words
    return unicodedata.normalize("NFKD", " ".join(kept)) or " ".join(folded.split())


def tokens_of(text: str) -> list[str]:
    """Return the words of a text as in `normalised`, with numbers as digits, and its marks: ",", "/", "." and "?".

    "&" is "and"; a "." follows each "?"; marks between digits are none.
    """
    folded = _folded(text)
    parts = [_with_mark(folded, index) for index in range(len(folded))]
    words = unicodedata.normalize("NFKD", "".join(parts)).split()
    return [NUMBER_WORDS.get(word, word) for word in words if word not in ARTICLES]


def _folded(text: str) -> str:
    """Return a text in one case and form, without apostrophes and characters that are not seen."""
    visible = "".join(
        character for character in text if character not in APOSTROPHES and unicodedata.category(character) != "Cf"
    )
    for _ in range(2):
        visible = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", visible).casefold())
    return visible


def _without_mark(text: str, index: int) -> str:
    """Return a character, or the space that normalisation puts in the place of punctuation."""
    character = text[index]
    if character in HYPHENS:
        after, before = text[index + 1 : index + 2], text[index - 1 : index]
        return "-" if after.isdigit() and not before.isalnum() else " "
    if character == "." and text[index - 1 : index].isdigit() and text[index + 1 : index + 2].isdigit():
        return character
    return " " if character not in KEPT_MARKS and unicodedata.category(character)[0] == "P" else character


def _with_mark(text: str, index: int) -> str:
    """Return a character, the token of a mark, or the space in the place of other punctuation."""
    kept = _without_mark(text, index)
    between_digits = text[index - 1 : index].isdigit() and text[index + 1 : index + 2].isdigit()
    return MARKS.get(text[index], kept) if kept.isspace() and not between_digits else kept


def word_set(words: str) -> frozenset[str]:
    """Return the words between the white space of a constant."""
    return frozenset(words.split())


MOST_OTHERS = 40
"""A text with more tokens besides the right ones states nothing: it may name all that there is."""

MOST_STATED = 5
"""An option or number that a text repeats more often is no answer, and would take long to judge."""

FEW = 2
"""Up to so many tokens beside a comma or between full stops are an item of a list: red, light green."""

NEGATIONS = word_set(
    "not no never none nothing nobody neither nor non without cannot wrong incorrect false isnt arent wasnt werent "
    "dont doesnt didnt cant couldnt wont wouldnt shouldnt hasnt havent hadnt aint lack lacks lacked lacking hardly "
    "barely scarcely doubt doubts doubtful"
)

DENIALS = (["rule", "out"], ["ruled", "out"], ["far", "from"])
"""Words that deny, in pairs."""

BOUNDS = (["at", "least"], ["at", "most"], ["up", "to"])
"""Before an answer, they make it a bound: "at least 3" may be 5. "More than 3" is a contrast."""

CONTRASTS = word_set("than instead rather unlike except besides but")
"""Before words, they say that something else is meant."""

HEDGES = word_set("or either")

POSSIBLE = word_set("could may might maybe perhaps possibly probably")
"""What is only possible may stand once: "It might be red. It might also be blue." states nothing."""

TAKEN_BACK = word_set("wait actually sorry however alternatively but")
"""After a mark, they take back what was said before it."""

VERBS = word_set("is are was were has have had looks look appears appear seems seem")
"""What precedes one in its clause is the subject."""

RELATIVES = word_set("that which who")

BREAKS = RELATIVES | word_set(", because since as where when while and but so")
"""A new clause begins with them."""

MARK_WORDS = word_set(", . ?")

JOINTS = word_set("and / | vs versus")
"""Beside words, they say that these are one of several."""

PASSED = MARK_WORDS | JOINTS
"""Tokens that may stand between the words of an answer, or be missing: "red, white" is "red and white"."""

ENUMERATED = re.compile(r"(?<!\w)1[.)]\s.*(?<!\w)2[.)]\s", re.DOTALL)
"""A numbered list."""

WEAK = word_set(
    "in on at to of it is are was were be he she they i you we this that these those there here for by with as from"
)
"""Words that every sentence has: alone they are no answer."""


def states(text: str, gold: str) -> bool:
    """Return whether a text states the words of a right answer, and no other answer beside them.

    They must follow each other, and be whole. Those of a sentence ("The food is fries") may have others between them,
    and what stands before or behind its last verb ("fries") may be the whole text.
    A text states nothing that it denies, asks, offers as one of several, takes back, or mentions in a clause's subject.
    """
    tokens, wanted = tokens_of(text), _words(tokens_of(gold))
    places = [index for index, token in enumerate(tokens) if token not in PASSED]
    possible = sum(token in POSSIBLE for token in tokens)
    if not _is_answer(wanted) or possible > 1 or len(tokens) > len(wanted) + MOST_OTHERS or ENUMERATED.search(text):
        return False
    words, spans = _words(tokens), _together(_words(tokens), wanted)
    if verbs := [index for index, word in enumerate(wanted) if word in VERBS and 0 < index < len(wanted) - 1]:
        if words in (wanted[: verbs[-1]], wanted[verbs[-1] + 1 :]):
            return _is_answer(words)
        spans = spans or _in_order(words, wanted)
    digits = any(map(_has_digit, wanted))
    return bool(spans) and all(
        _is_all(tokens[: places[first]], tokens[places[last] + 1 :], digits) for first, last in spans
    )


def denials(text: str) -> int:
    """Return how many words of a text deny something."""
    return sum(token in NEGATIONS for token in tokens_of(text))


def asserted(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether what stands between two parts of a text is not denied, asked, one of several or taken back.

    before, after: their tokens.
    """
    sentence, rest = _sentence(before, after)
    return not (
        (NEGATIONS | CONTRASTS) & frozenset(_without_relative_clause(sentence))
        or NEGATIONS & frozenset(_clause(rest))
        or HEDGES & frozenset([*sentence, *rest])
        or any(pair in DENIALS for part in (sentence, rest) for pair in map(list, pairwise(part)))
        or sentence[-2:] in BOUNDS
        or sentence[-1:] == ["from"]
        or any(word == "but" and after_it in VERBS for word, after_it in pairwise(rest))
        or "?" in rest
        or _taken_back(after)
    )


def listed(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether what stands between two parts of a text is an item of a list there."""
    sentence, rest = _sentence(before, after)
    if JOINTS & {*sentence[-1:], *rest[:1]}:
        return True
    if rest[:1] == [","]:
        item = _parts(rest[1:], ",")[0]
        return "and" in rest or (len(item) <= FEW and not NEGATIONS & set(item))
    if not sentence and not rest:
        earlier, later = (list(filter(None, _parts(some, "."))) for some in (before, after))
        return any(len(part) <= FEW for part in (*earlier[-1:], *later[:1]))
    return sentence[-1:] == [","] and (bool(VERBS & set(sentence)) or len(sentence) <= 1 + FEW)


def _words(tokens: Sequence[str]) -> list[str]:
    return [token for token in tokens if token not in PASSED]


def _is_answer(words: Sequence[str]) -> bool:
    return any(word not in WEAK and (len(word) > 1 or _has_digit(word)) for word in words)


def _together(words: Sequence[str], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of the first and last of all words that are those wanted."""
    size = len(wanted)
    return [
        (index, index + size - 1) for index in range(len(words) - size + 1) if words[index : index + size] == wanted
    ]


def _in_order(words: Sequence[str], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """Return the last place of the last word, twice, if the others stand before it in their order."""
    ends = [index for index, word in enumerate(words) if word == wanted[-1]]
    earlier = iter(words[: ends[-1]] if ends else ())
    return [(ends[-1], ends[-1])] if ends and all(word in earlier for word in wanted[:-1]) else []


def _is_all(before: Sequence[str], after: Sequence[str], digits: bool) -> bool:
    """Return whether a text says nothing against what stands between two parts of it. digits: whether that has any."""
    sentence, rest = _sentence(before, after)
    in_subject = len(_parts(sentence, ",")[-1]) > 1 and bool(VERBS & set(_clause(rest)))
    others = digits and any(map(_has_digit, [*sentence, *rest]))
    return asserted(before, after) and not listed(before, after) and not in_subject and not others


def _sentence(before: Sequence[str], after: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what precedes and what follows in the same sentence, without a "No," at its beginning."""
    sentence, rest = _parts(before, ".")[-1], _parts(after, ".")[0]
    return sentence[2:] if sentence[:2] in (["no", ","], ["yes", ","]) else sentence, rest


def _parts(tokens: Sequence[str], mark: str) -> list[list[str]]:
    """Return the tokens before, between and behind marks of one kind."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _without_relative_clause(sentence: Sequence[str]) -> list[str]:
    """Return the beginning of a sentence without "that is not little" before its own verb."""
    start = next((at for at, token in enumerate(sentence) if token in RELATIVES), len(sentence))
    verbs = [index for index, token in enumerate(sentence) if token in VERBS]
    return [*sentence[:start], *sentence[verbs[-1] :]] if len(verbs) > 1 and start < verbs[-2] else list(sentence)


def _clause(after: Sequence[str]) -> list[str]:
    end = next((index for index, token in enumerate(after) if token in BREAKS), len(after))
    return list(after[:end])


def _taken_back(after: Sequence[str]) -> bool:
    """Return whether a later part begins with "no" alone, or with a word such as "actually"."""
    padded = [*after, "."]
    return any(
        mark in MARK_WORDS and (word in TAKEN_BACK or (word == "no" and end in MARK_WORDS))
        for mark, word, end in zip(padded, padded[1:], padded[2:], strict=False)
    )


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)
