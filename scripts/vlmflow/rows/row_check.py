"""The verdict over one converted row by itself: schema, rules, picture; run over all cores."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec

from vlmflow.config.data_settings import RowLimits
from vlmflow.errors import VlmflowError
from vlmflow.parallel import ordered_map
from vlmflow.pictures.manifest import PictureEntry
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow, first_fault, may_hold_marks

SHARD_BYTES = 1 << 20


class Verdict(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What one converted row is worth by itself.

    raw_row: number of the raw row it comes from.
    reject: why it cannot be used; None where it can, and only then the rest holds something.
    picture: name of its picture in the store.
    picture_digest: SHA-256 of the picture's bytes.
    content_digest: 16 bytes over the picture and the whole conversation; equal in duplicates.
    attempts: how many answers it holds.
    line: the training row as JSON, with the line feed.
    """

    raw_row: int
    reject: Reject | None
    source: str = ""
    picture: str = ""
    picture_digest: bytes = b""
    content_digest: bytes = b""
    attempts: int = 0
    score_field_differs: bool = False
    line: bytes = b""


class _Origin(msgspec.Struct):
    raw_row: int


ROW = msgspec.json.Decoder(ConvertedRow)
ORIGIN = msgspec.json.Decoder(_Origin)
ENCODER = msgspec.json.Encoder()
PACKER = msgspec.msgpack.Encoder()
VERDICTS = msgspec.msgpack.Decoder(list[Verdict])
OWN_FIELDS = re.compile(rb',"raw_row":\d+,"score_field_differs":(?:true|false)}$')
"""What a converted row holds beyond a training row, as the converter writes it: at the end, in this order."""
OWN_FIELDS_LENGTH = 80
CONVERSATIONS = b',"conversations":['
"""Begins the last field of an encoded training row; inside a text its quotation marks would be escaped."""


def check_rows(
    converted: Path, pictures: Mapping[str, PictureEntry], limits: RowLimits, processes: int
) -> Iterator[Verdict]:
    """Yield the verdict over every line of `converted`, in order.

    pictures: what `resolve_images` found for every path that the rows name.

    Raises VlmflowError where a line tells not even which raw row it comes from.
    """
    if converted.stat().st_size == 0:
        return
    with converted.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        check_shard = partial(_check_shard, converted, content, pictures, limits)
        for verdicts in ordered_map(check_shard, _shards(content), processes):
            yield from VERDICTS.decode(verdicts)


def _shards(content: mmap) -> Iterator[tuple[int, int]]:
    """Cut the file at line ends into pieces of about SHARD_BYTES."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", min(start + SHARD_BYTES, len(content) - 1)) + 1 or len(content)
        yield start, end
        start = end


def _check_shard(
    converted: Path,
    content: mmap,
    pictures: Mapping[str, PictureEntry],
    limits: RowLimits,
    shard: tuple[int, int],
) -> bytes:
    """Give the verdicts packed: a third of what pickling them costs."""
    lines = content[slice(*shard)].splitlines()
    try:
        return PACKER.encode([_check(line, pictures, limits) for line in lines])
    except msgspec.DecodeError as error:
        raise VlmflowError(
            f"{converted}: a line between bytes {shard[0]} and {shard[1]} is damaged: {error}",
            f"remove {converted} and run the same command again",
        ) from None


def _check(line: bytes, pictures: Mapping[str, PictureEntry], limits: RowLimits) -> Verdict:
    try:
        row = ROW.decode(line)
    except msgspec.ValidationError as error:
        return Verdict(ORIGIN.decode(line).raw_row, Reject("schema", str(error)))
    if fault := first_fault(row, limits, marks=may_hold_marks(line)):
        return Verdict(row.raw_row, fault)
    picture = pictures.get(row.images[0])
    if picture is None:
        return Verdict(row.raw_row, Reject("picture_unresolved", f"{row.images[0]!r} is not in the manifest"))
    if picture.reason is not None:
        detail = f"{row.images[0]}: {picture.detail}"
        return Verdict(row.raw_row, Reject(f"picture_{picture.reason}", detail))
    picture_digest = bytes.fromhex(picture.sha256)
    training_line = _training_line(line, row, picture.name)
    return Verdict(
        raw_row=row.raw_row,
        reject=None,
        source=row.source,
        picture=picture.name,
        picture_digest=picture_digest,
        content_digest=_content_digest(picture_digest, training_line),
        attempts=len(row.attempts),
        score_field_differs=row.score_field_differs,
        line=training_line,
    )


def _content_digest(picture_digest: bytes, line: bytes) -> bytes:
    conversations = line[line.index(CONVERSATIONS) :]
    return hashlib.blake2b(conversations, digest_size=16, key=picture_digest).digest()


def _training_line(line: bytes, row: ConvertedRow, picture: str) -> bytes:
    """Give the training row as JSON: the converted line without its own fields, where the picture keeps its name."""
    if picture == row.images[0] and (own := OWN_FIELDS.search(line, max(0, len(line) - OWN_FIELDS_LENGTH))):
        return line[: own.start()] + b"}\n"
    made = ShareGptRow(
        id=row.id,
        source=row.source,
        images=[picture],
        attempts=list(map(int, row.attempts)),
        scores=list(map(int, row.scores)),
        conversations=row.conversations,
    )
    return ENCODER.encode(made) + b"\n"
