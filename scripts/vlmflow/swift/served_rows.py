"""Rows as servers give them to a model, by its own chat template, compared with how they are trained.

The template is its owner's text: it renders in a child process, with limits of memory and time.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from vlmflow.rows.chat import as_written, declarations_of, messages_of, places_answered
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import failure, limited

SMALL = (32, 32)
"""Width and height in pixels of the pictures that stand in for others."""

SHOWN = 12
"""Tokens that are shown of a difference, and before it."""

AT_A_TIME = 10_000
"""Rows that one child process renders: its time is limited, and a row takes less than a millisecond."""


class NoToolsError(Exception):
    """A chat template writes no tools."""


def first_difference(processor: Any, rows: Sequence[ShareGptRow], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare rows as they are trained with what a server gives to the model before each answer, and the answers.

    processor: the model's processor, or its tokenizer if it sees no pictures. trained: the tokens of each row in the
    training. A picture is one token or more in them.

    Returns {} if all are equal. {"failed": …, "row": …}: the template raised an error. {"failed": …}: it went beyond a
    limit. {"no_tools": True, "row": …}: it writes none of a row's tools. Otherwise the first difference: "row"; the
    texts "before" it, "trained" and "served".
    """
    import transformers.utils.chat_template_utils  # noqa: F401  # the child finds it loaded

    return limited(partial(_compare, processor, rows, trained, _picture(processor)))


def first_other_text(processor: Any, files: Iterable[Path], form: ChatForm) -> dict[str, Any]:
    """Compare all rows of some files as texts: a template may write other ones where a row says something.

    The text before a row's last answer is compared, and the answer. form: the texts that are trained. Otherwise as
    `first_difference`.
    """
    import transformers.utils.chat_template_utils  # noqa: F401

    picture = _picture(processor)
    for file in files:
        rows = iter(lines_of(file, ShareGptRow))
        while some := list(islice(rows, AT_A_TIME)):
            if first := limited(partial(_compare_texts, processor, some, form, picture)):
                return first
    return {}


def _compare_texts(
    processor: Any, rows: Sequence[ShareGptRow], form: ChatForm, picture: tuple[int | None, list[int]]
) -> dict[str, Any]:
    tokenizer = getattr(processor, "tokenizer", processor)
    for row in rows:
        first, end = list(places_answered(row.conversations))[-1]
        pieces = form.pieces(row)
        try:
            served = _rendered(processor, row, first, True, row.tools) + _answered(row, first, end)
        except Exception as error:  # whatever the template does
            return {"row": row.id, **failure(error)}
        if not "".join(pieces).startswith(served):
            trained = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
            if difference := _compare(processor, [row], [trained], picture):
                return difference
    return {}


def picture_token(processor: Any) -> int | None:
    """Return the token that a picture has many of; None for a model that sees none. processor: or its tokenizer."""
    # The tokenizer first: of Gemma 3's processor, image_token_id is the mark before a picture (transformers 5).
    named = (getattr(owner, "image_token_id", None) for owner in (getattr(processor, "tokenizer", None), processor))
    return next((number for number in named if number is not None), None)


@cache
def _picture(processor: Any) -> tuple[int | None, list[int]]:
    """Return the token that a chat template writes for a picture, and what the processor makes of it.

    None without pictures, and for a processor that writes a picture otherwise.
    """
    from PIL import Image

    mark = getattr(processor, "image_token", None)
    if isinstance(mark, str):
        blank = Image.new("RGB", SMALL)
        with suppress(Exception):  # whatever a processor asks of a text
            made = processor(text=[mark], images=[blank], add_special_tokens=False)["input_ids"][0]
            ids = processor.tokenizer(mark, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                return ids[0], list(map(int, made))
    return None, []


def _compare(
    processor: Any,
    rows: Sequence[ShareGptRow],
    trained: Sequence[Sequence[int]],
    picture_of: tuple[int | None, list[int]],
) -> dict[str, Any]:
    tokenizer = getattr(processor, "tokenizer", processor)
    picture = picture_token(processor)
    mark, made = picture_of
    for row, ids in zip(rows, trained, strict=True):
        try:
            prompts = _served(processor, tokenizer, row)
        except NoToolsError:
            return {"row": row.id, "no_tools": True}
        except Exception as error:  # whatever the template does
            return {"row": row.id, **failure(error)}
        expected = _pictures_as_one(ids, picture)
        for prompt in prompts:
            served = [token for read in prompt for token in (made if read == mark else [read])]
            served = _pictures_as_one(served, picture)
            if expected[: len(served)] != served:
                return {"row": row.id, **_shown(tokenizer, expected, served)}
    return {}


def _served(processor: Any, tokenizer: Any, row: ShareGptRow) -> list[list[int]]:
    """Return for each answer of a row what the model has read when it has written it: the prompt, text and calls.

    Raises whatever the template raises, also for the whole conversation, which shows whether it writes tools.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns, tools = row.conversations, row.tools
    whole = _rendered(processor, row, len(turns), False, tools)
    if tools and whole == _rendered(processor, row, len(turns), False, ""):
        raise NoToolsError
    return [
        tokens(_rendered(processor, row, first, True, tools)) + tokens(_answered(row, first, end))
        for first, end in places_answered(turns)
    ]


def _rendered(processor: Any, row: ShareGptRow, turns: int, prompt: bool, tools: str) -> str:
    """Return the first turns of a row as the model's chat template writes them. prompt: whether an answer is next."""
    shown = row.until(turns)
    messages = messages_of(shown.conversations, [{"type": "image"}] * len(shown.images))
    given: Mapping[str, Any] = {"tools": declarations_of(tools), "add_generation_prompt": prompt}
    return str(processor.apply_chat_template(messages, tokenize=False, **given))


def _answered(row: ShareGptRow, first: int, end: int) -> str:
    return "\n".join(as_written(row.conversations[first:end]))


def _pictures_as_one(ids: Sequence[int], picture: int | None) -> list[int]:
    """Return tokens with a single one for each picture, as a template writes it."""
    return [token for last, token in zip([None, *ids], ids, strict=False) if token != picture or last != picture]


def _shown(tokenizer: Any, trained: Sequence[int], served: Sequence[int]) -> dict[str, str]:
    pairs = enumerate(zip(trained, served, strict=False))
    at = next((n for n, (own, other) in pairs if own != other), min(len(trained), len(served)))
    return {
        "before": tokenizer.decode(trained[max(0, at - SHOWN) : at]),
        "trained": tokenizer.decode(trained[at : at + SHOWN]),
        "served": tokenizer.decode(served[at : at + SHOWN]),
    }
