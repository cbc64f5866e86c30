"""Alpaca's instructions: {"instruction": …, "input": …, "output": …}."""

from typing import Protocol

from vlmflow.config.key_meanings import HISTORY, OF_CONVERSATIONS
from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.raw_text import Reading, question_and_answer


class Row(Protocol):
    """The keys of a row."""

    instruction: str
    input: str | None
    output: str


def read(raw: Row, prompt: str | None) -> Reading:
    """Return the two turns of a row; the question is that of ms-swift (AlpacaPreprocessor.concat_inst_input)."""
    asked = "\n".join(filter(None, (raw.instruction, raw.input)))
    return question_and_answer(asked, raw.output)


FORM = RawForm(
    kinds=("alpaca",),
    row='`{"instruction": …, "input": …, "output": …}`; `input` may be missing',
    content=Row,
    read=read,
    meanings=OF_CONVERSATIONS | HISTORY,
)
