"""The question of a row, and a normal form that is equal for questions that differ only in case, spaces or marks."""

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

from vlmflow.rows.chat import IMAGE_TAG

AROUND = " \t\n.,;:?!…"
"""Characters that are ignored at the end of a question."""


def question_of(texts: Sequence[str], one_prompt: bool) -> tuple[str, str]:
    """Return a row's question twice: exact, and normalised.

    texts: its turns without system's; the first is the question.
    one_prompt: all rows have the same question, so the first answer is added.
    """
    asked = texts[: 1 + one_prompt]
    return "\n".join(asked), "\n".join(map(normalised, asked))


def normalised(text: str) -> str:
    """Return a text without differences in Unicode form (NFKC), letter case, white space, picture tags and last marks.

    A text that consists only of marks keeps them.
    """
    text = unicodedata.normalize("NFKC", text.replace(IMAGE_TAG, " ")).casefold()
    text = " ".join(text.split())
    return text.rstrip(AROUND) or text


def question_key(question: str) -> bytes:
    """Return a digest of 8 bytes (BLAKE2b), which takes less memory than the text."""
    return blake2b(question.encode(), digest_size=8).digest()
