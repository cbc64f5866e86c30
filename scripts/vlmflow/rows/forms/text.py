"""Texts, which are the answers to the prompt in the configuration: {"text": …}."""

from typing import Protocol

from vlmflow.config.raw_forms import OF_TEXTS, RawForm
from vlmflow.rows.raw_text import Reading, question_and_answer


class Row(Protocol):
    """A raw row. text: the answer."""

    text: str


def read(raw: Row, prompt: str | None) -> Reading:
    """Return the two turns of a row; the question is the setting `prompt`."""
    return question_and_answer(prompt or "", raw.text)


FORM = RawForm(
    kinds=("text",),
    row='`{"text": …}`; `prompt` in the configuration is the question before every text',
    content=Row,
    read=read,
    meanings=OF_TEXTS,
    settings=("ignore_keys", "prompt"),
    one_prompt=True,
)
