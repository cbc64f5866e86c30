"""Compares rows as they are trained with what a server gives to the model, by the model's own chat template.

The template is its owner's text: it renders in a child process, with limits of memory and time.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, tzinfo
from functools import partial
from typing import Any, Self

from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from vlmflow.rows.chat import as_written, declarations_of, messages_of, places_answered
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.swift.child_process import failure, limited
from vlmflow.swift.row_counter import SMALL, picture_token

DAYS = (datetime(2001, 2, 3, 4, 5), datetime(2034, 11, 28, 17, 6))
"""When the rows are rendered: a template may write the date, and the training keeps that of its own day."""

SHOWN = 12
"""Tokens that are shown of a difference, and before it."""


class NoToolsError(Exception):
    """A chat template writes no tools."""


def first_difference(processor: Any, rows: Sequence[ShareGptRow], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare some rows.

    processor: the model's processor, or its tokenizer if it sees no pictures. trained: the tokens of each row in the
    training. A picture is one token or more in them.

    Returns {} if all are equal. {"failed": …, "row": …}: the template raised an error. {"failed": …}: it went beyond a
    limit. {"no_tools": True, "row": …}: it writes none of a row's tools. Otherwise the first difference: "row"; the
    texts "before" it, "trained" and "served"; "day", on which it is rendered, if the template writes the date.
    """
    return limited(partial(_compare, processor, rows, trained, _picture(processor)))


def _picture(processor: Any) -> tuple[int, list[int]] | None:
    """Return the token that a chat template writes for a picture, and what the processor makes of it.

    None without pictures, and for a processor that writes a picture otherwise.
    """
    mark = getattr(processor, "image_token", None)
    if not isinstance(mark, str):
        return None
    blank = Image.new("RGB", SMALL)
    with suppress(Exception):  # whatever a processor asks of a text
        made = processor(text=[mark], images=[blank], add_special_tokens=False)["input_ids"][0]
        ids = processor.tokenizer(mark, add_special_tokens=False)["input_ids"]
        return (ids[0], list(map(int, made))) if len(ids) == 1 else None
    return None


def _compare(
    processor: Any,
    rows: Sequence[ShareGptRow],
    trained: Sequence[Sequence[int]],
    picture_of: tuple[int, list[int]] | None,
) -> dict[str, Any]:
    tokenizer = getattr(processor, "tokenizer", processor)
    picture = picture_token(processor)
    mark, made = picture_of or (None, [])
    for row, ids in zip(rows, trained, strict=True):
        try:
            by_day = [_served(processor, tokenizer, row, day) for day in DAYS]
        except NoToolsError:
            return {"row": row.id, "no_tools": True}
        except Exception as error:  # whatever the template does
            return {"row": row.id, **failure(error)}
        expected = _pictures_as_one(ids, picture)
        for day, prompts in zip(DAYS, by_day, strict=True):
            for prompt in prompts:
                written = (token for each in prompt for token in (made if each == mark else [each]))
                served = _pictures_as_one(list(written), picture)
                if expected[: len(served)] != served:
                    shown = _shown(tokenizer, expected, served)
                    return {"row": row.id, "day": None if by_day[0] == by_day[1] else f"{day:%Y-%m-%d}", **shown}
    return {}


def _served(processor: Any, tokenizer: PreTrainedTokenizerBase, row: ShareGptRow, day: datetime) -> list[list[int]]:
    """Return for each answer of a row what the model has read when it has written it: the prompt, text and calls.

    Raises whatever the template raises, also for the whole conversation, which shows whether it writes tools.
    """

    class OnThatDay(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(day.year, day.month, day.day, day.hour, day.minute, tzinfo=tz)

    chat_template_utils.datetime = OnThatDay  # only in this child

    def rendered(number: int, prompt: bool, tools: str) -> str:
        shown = row.until(number)
        messages = messages_of(shown.conversations, [{"type": "image"}] * len(shown.images))
        given = {"tools": declarations_of(tools), "add_generation_prompt": prompt}
        return str(processor.apply_chat_template(messages, tokenize=False, **given))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns, tools = row.conversations, row.tools
    whole = rendered(len(turns), False, tools)
    if tools and whole == rendered(len(turns), False, ""):
        raise NoToolsError
    return [
        tokens(rendered(first, True, tools)) + tokens("\n".join(as_written(turns[first:end])))
        for first, end in places_answered(turns)
    ]


def _pictures_as_one(ids: Sequence[int], picture: int | None) -> list[int]:
    """Return tokens with a single one for each picture, as a template writes it."""
    return [token for last, token in zip([None, *ids], ids, strict=False) if token != picture or last != picture]


def _shown(tokenizer: PreTrainedTokenizerBase, trained: Sequence[int], served: Sequence[int]) -> dict[str, str]:
    pairs = enumerate(zip(trained, served, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(trained), len(served)))
    return {
        "before": tokenizer.decode(trained[max(0, at - SHOWN) : at]),
        "trained": tokenizer.decode(trained[at : at + SHOWN]),
        "served": tokenizer.decode(served[at : at + SHOWN]),
    }
