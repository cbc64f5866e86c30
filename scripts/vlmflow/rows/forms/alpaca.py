"""Alpaca's instructions: {"instruction": …, "input": …, "output": …}, with LLaMA-Factory's `system` and `history`."""

from typing import Protocol

from vlmflow.config.raw_forms import HISTORY, OF_CONVERSATIONS, RawForm
from vlmflow.rows.raw_text import Reading, rounds


class Row(Protocol):
    """A raw row. history: the rounds before, each a question with its answer."""

    instruction: str
    input: str | None
    output: str
    system: str | None
    history: list[tuple[str, str]] | None


def read(raw: Row, prompt: str | None) -> Reading:
    """Return the turns of a row; the question is that of ms-swift (AlpacaPreprocessor.concat_inst_input)."""
    question = "\n".join(filter(None, (raw.instruction, raw.input)))
    return rounds([(question, raw.output)], raw.system, raw.history)


FORM = RawForm(
    kinds=("alpaca",),
    row=(
        '`{"instruction": …, "input": …, "output": …}`; `input` may be missing; also `system`, and in `history` the '
        "rounds before, `[[question, answer], …]`"
    ),
    content=Row,
    read=read,
    answer="output",
    meanings=OF_CONVERSATIONS | HISTORY,
)
