"""Alpaca's instructions: {"instruction": …, "input": …, "output": …}."""

from typing import Any

from vlmflow.config.key_meanings import HISTORY, OF_CONVERSATIONS
from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import Turn
from vlmflow.rows.raw_text import question_and_answer
from vlmflow.rows.rejects import Reject


def read(raw: Any, prompt: str | None) -> list[Turn] | Reject:
    """Give a row's two turns, put together as ms-swift does (AlpacaPreprocessor.concat_inst_input)."""
    asked = "\n".join(filter(None, (raw.instruction, raw.input)))
    return question_and_answer("instruction", asked, raw.output)


FORM = RawForm(
    kinds=("alpaca",),
    row='`{"instruction": …, "input": …, "output": …}`; `input` may be missing',
    keys={"instruction": str, "input": str | None, "output": str},
    read=read,
    meanings=OF_CONVERSATIONS | HISTORY,
)
