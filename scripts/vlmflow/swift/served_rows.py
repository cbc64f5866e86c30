"""Compares rows as they are trained with what a server gives to the model, by the model's own chat template.

The template is its owner's text: it renders in a child process, with limits of memory and time.
"""

import json
import multiprocessing
import os
import resource
from collections.abc import Sequence
from datetime import datetime, tzinfo
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from vlmflow.core.process import bound_to_this_process
from vlmflow.rows.chat import IMAGE_TAG
from vlmflow.rows.data_rows import Row
from vlmflow.rows.messages import messages_of

DAYS = (datetime(2001, 2, 3, 4, 5), datetime(2034, 11, 28, 17, 6))
"""When the rows are rendered: a template may write the date, and the training keeps that of its own day."""

MEMORY = 1 << 30
"""Bytes that the child may have more than this process."""

SECONDS = 60.0
"""How long the child may take; it takes a few milliseconds per row."""

SHOWN = 12
"""Tokens that are shown of a difference, and before it."""

MOST_CHARS = 500
"""Characters that are kept of a template's own error."""


def first_difference(processor: Any, rows: Sequence[Row], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare some rows.

    processor: the model's processor, or its tokenizer if it sees no pictures. trained: the tokens of each row in the
    training. A picture is one token or more in them.

    Returns {} if all are equal. {"failed": …, "row": …}: the template raised an error. {"failed": …}: it went beyond a
    limit. Otherwise the first difference: "row"; the texts "before" it, "trained" and "served"; "day", on which it is
    rendered, if the template writes the date.
    """
    context = multiprocessing.get_context("fork")  # the libraries are loaded, and the child only renders
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_limited, args=(bound_to_this_process(), sender, processor, rows, trained))
    child.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return {"failed": f"it was not done after {SECONDS:g} s"}
        found: dict[str, Any] = json.loads(receiver.recv_bytes())
        return found
    except EOFError:
        return {"failed": f"it takes more than {MEMORY / 1e9:.1f} GB of memory"}
    finally:
        child.kill()
        child.join()


def _limited(bind: Any, sender: Connection, *compared: Any) -> None:
    bind()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sender.send_bytes(json.dumps(_compare(*compared)).encode())


def _compare(processor: Any, rows: Sequence[Row], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
    tokenizer = getattr(processor, "tokenizer", processor)
    picture = getattr(processor, "image_token_id", None)
    for row, ids in zip(rows, trained, strict=True):
        try:
            by_day = [_served(processor, tokenizer, row, day) for day in DAYS]
        except Exception as error:  # whatever the template does
            return {"row": row.id, "failed": f"{type(error).__name__}: {error}"[:MOST_CHARS]}
        expected = _pictures_as_one(ids, picture)
        for day, prompts in zip(DAYS, by_day, strict=True):
            for served in prompts:
                if expected[: len(served)] != served:
                    shown = _shown(tokenizer, expected, served)
                    return {"row": row.id, "day": None if by_day[0] == by_day[1] else f"{day:%Y-%m-%d}", **shown}
    return {}


def _served(processor: Any, tokenizer: PreTrainedTokenizerBase, row: Row, day: datetime) -> list[list[int]]:
    """Return for each answer of a row what the model has read when it has written it: the prompt, and the answer.

    Raises whatever the template raises, also for the whole conversation, which the proof of the merged weights renders.
    """

    class OnThatDay(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(day.year, day.month, day.day, day.hour, day.minute, tzinfo=tz)

    chat_template_utils.datetime = OnThatDay  # only in this child

    def rendered(number: int, prompt: bool) -> str:
        turns = row.conversations[:number]
        messages = messages_of(turns, [{"type": "image"}] * sum(turn.value.count(IMAGE_TAG) for turn in turns))
        return str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    rendered(len(row.conversations), False)
    return [
        tokens(rendered(number, True)) + tokens(turn.value)
        for number, turn in enumerate(row.conversations)
        if turn.speaker == "gpt"
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
