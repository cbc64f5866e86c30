"""How many tokens each row will have, before a GPU sees it: text by the model's tokenizer, pictures by rule."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from vlmflow.pictures.manifest import PictureEntry
from vlmflow.progress import Progress
from vlmflow.rows.sharegpt import IMAGE_TAG, ShareGptRow

ROLES = {"human": "user", "gpt": "assistant"}
MIN_PICTURE_TOKENS = 4
"""qwen_vl_utils' IMAGE_MIN_TOKEN_NUM: smaller pictures are scaled up to it."""

ROWS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class RowLength:
    """One row of a training file.

    start, end: its bytes in the file. tokens: text and picture tokens after the picture budget.
    """

    id: str
    start: int
    end: int
    tokens: int


def row_lengths(rows: Path, pictures: Iterable[PictureEntry], model: Path, image_max_tokens: int) -> list[RowLength]:
    """Give the length of every row of a training file, in its order.

    pictures: the image manifest of the rows. model: the base model's folder.

    The chat form is Qwen's (ChatML), as ms-swift's templates of Qwen3 and Qwen3-VL write it: the lengths are
    the trainer's own, which a test compares.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    picture_tokens = picture_tokens_of(model, image_max_tokens)
    sizes = {entry.name: (entry.width, entry.height) for entry in pictures if entry.reason is None}
    lengths: list[RowLength] = []
    with Progress(f"token lengths of {rows.name}", rows.stat().st_size, "bytes") as progress:
        for batch in _batches(rows):
            encoded = tokenizer.encode_batch_fast([chat_text(row) for row, _, _ in batch], add_special_tokens=False)
            for (row, start, end), text in zip(batch, encoded, strict=True):
                tokens = len(text)
                tokens += sum(picture_tokens(*sizes[name]) - 1 for name in row.images)  # its pad counted once
                lengths.append(RowLength(row.id, start, end, tokens))
                progress.advance(end - start)
    return lengths


def chat_text(row: ShareGptRow) -> str:
    """Write a row as the model reads it, one pad token for each picture."""
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    return "".join(
        f"<|im_start|>{ROLES[turn.speaker]}\n{turn.value.replace(IMAGE_TAG, picture)}<|im_end|>\n"
        for turn in row.conversations
    )


def picture_tokens_of(model: Path, image_max_tokens: int) -> Callable[[int, int], int]:
    """Give the function from a picture's width and height in pixels to its tokens.

    Qwen-VL cuts a picture into squares of patch_size × merge_size pixels, one token each, after scaling it
    into the budget (qwen_vl_utils.vision_process.smart_resize). A model without pictures has none.
    """
    file = model / "preprocessor_config.json"
    if not file.exists():
        return lambda width, height: 0
    from qwen_vl_utils.vision_process import smart_resize

    config = json.loads(file.read_text())
    side = config["patch_size"] * config["merge_size"]

    def tokens(width: int, height: int) -> int:
        scaled_height, scaled_width = smart_resize(
            height, width, side, MIN_PICTURE_TOKENS * side**2, image_max_tokens * side**2
        )
        return (scaled_height // side) * (scaled_width // side)

    return tokens


def _batches(rows: Path) -> Iterator[list[tuple[ShareGptRow, int, int]]]:
    decoder = msgspec.json.Decoder(ShareGptRow)

    def placed() -> Iterator[tuple[ShareGptRow, int, int]]:
        start = 0
        with rows.open("rb") as lines:
            for line in lines:
                yield decoder.decode(line), start, start + len(line)
                start += len(line)

    place = placed()
    while batch := list(islice(place, ROWS_AT_ONCE)):
        yield batch
