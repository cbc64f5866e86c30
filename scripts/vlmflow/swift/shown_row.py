"""Shows people a row as the model reads it: what the chat template adds, and what is trained."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from vlmflow.rows.chat import IMAGE_TAG
from vlmflow.rows.sharegpt import ShareGptRow

IGNORED = -100
"""The label of a token that is not trained (torch.nn.CrossEntropyLoss, ignore_index)."""

MOST_CHARS = 20_000
"""Characters of a row that are shown."""


def shown_row(processor: Any, row: ShareGptRow, ids: Sequence[int], labels: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row's text in parts: "text", whether it is "trained", and whether the template has "added" it.

    processor: the model's, or its tokenizer. ids, labels: the row's tokens in the training. A picture is one token.
    """
    tokenizer, picture = getattr(processor, "tokenizer", processor), picture_token(processor)
    both = [(one, label != IGNORED) for one, label in zip(ids, labels, strict=True)]
    alone = [each for last, each in zip([None, *ids], both, strict=False) if each[0] != picture or last != picture]
    own = [text for turn in row.conversations for text in turn.value.split(IMAGE_TAG) if text.strip()]
    parts, left = [], MOST_CHARS
    for trained, tokens in groupby(alone, key=lambda each: each[1]):
        text = tokenizer.decode([token for token, _ in tokens])[:left]
        left -= len(text)
        parts += [{"text": part, "trained": trained, "added": added} for part, added in _by_whom(text, own) if part]
    return parts


def picture_token(processor: Any) -> int | None:
    """Return the token that a picture has many of; None for a model that sees none. processor: or its tokenizer."""
    # The tokenizer first: of Gemma 3's processor, image_token_id is the mark before a picture (transformers 5).
    named = (getattr(each, "image_token_id", None) for each in (getattr(processor, "tokenizer", None), processor))
    return next((number for number in named if number is not None), None)


def _by_whom(text: str, own: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether the template has added each. own: the row's texts, less those found."""
    while own and (at := text.find(own[0].strip())) >= 0:
        said = own.pop(0).strip()
        yield text[:at], True
        yield said, False
        text = text[at + len(said) :]
    yield text, True
