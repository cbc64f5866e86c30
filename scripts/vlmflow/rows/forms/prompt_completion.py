"""Prompts with their completions, in TRL's form: {"prompt": …, "completion": …}."""

from typing import Protocol

from vlmflow.config.raw_forms import HISTORY, OF_CONVERSATIONS, RawForm
from vlmflow.rows.raw_text import Reading, question_and_answer


class Row(Protocol):
    """A raw row whose two keys are texts; lists become rows of `messages` (`lists_are`)."""

    prompt: str
    completion: str


def read(raw: Row, prompt: str | None) -> Reading:
    """Return the two turns of a row."""
    return question_and_answer(raw.prompt, raw.completion)


FORM = RawForm(
    kinds=("prompt_completion",),
    row='`{"prompt": …, "completion": …}`, both texts, or both lists of `messages`',
    content=Row,
    read=read,
    answer="completion",
    pictures_in_turns=True,
    lists_are="messages",
    meanings=OF_CONVERSATIONS | HISTORY,
)
