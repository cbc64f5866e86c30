"""What scoring says of answers, apart from its libraries: pages are drawn where these are not installed."""

from typing import Literal

import msgspec

Rule = Literal["option", "number", "yes_no", "words", "text"]
"""Our rules by which answers are compared with a gold answer."""


class Overlap(msgspec.Struct, frozen=True):
    """Words that answers share with their references. answers: how many. bleu: BLEU-1 to BLEU-4 of all answers.

    cider: the mean CIDEr-D; null for fewer than two answers.
    """

    answers: int
    bleu: list[float]
    cider: float | None
