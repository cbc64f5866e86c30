"""What a row asks, and when two rows ask the same though their letters differ."""

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

from vlmflow.rows.chat import IMAGE_TAG

AROUND = " \t\n.,;:?!…"
"""What may stand at the end of a question without making it another one."""


def question_of(texts: Sequence[str], one_prompt: bool) -> tuple[str, str]:
    """Give what a row asks, to the letter and normalised: its first human turn, with one_prompt the answer too.

    texts: its turns, without one from system.
    """
    asked = texts[: 1 + one_prompt]
    return "\n".join(asked), "\n".join(map(normalised, asked))


def normalised(text: str) -> str:
    """Give what makes two questions the same: Unicode form, letter case, white space and the last marks aside.

    A text of nothing but marks keeps them.
    """
    text = unicodedata.normalize("NFKC", text.replace(IMAGE_TAG, " ")).casefold()
    text = " ".join(text.split())
    return text.rstrip(AROUND) or text


def question_key(question: str) -> bytes:
    """Give 8 bytes that are the same for the same text."""
    return blake2b(question.encode(), digest_size=8).digest()
