"""The verdict over one converted row by itself: schema, rules, picture; run over all cores."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.config.row_settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.core.parallel import ordered_map
from vlmflow.core.progress import Progress
from vlmflow.pictures.image_manifest import PictureEntry, name_and_digest
from vlmflow.rows.chat import said
from vlmflow.rows.converted import ConvertedRow, training_line
from vlmflow.rows.questions import question_key, question_of
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow, conversation_in, first_fault, may_hold_marks

SHARD_BYTES = 1 << 20


class Grouped(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The first fields of a verdict, which tell of which group a raw row is.

    raw_row: number of the raw row it comes from.
    reject: why it cannot be used; None where it can, and only then the rest holds something.
    group: what decides over its split: SHA-256 of the picture's bytes, or of the prompt (see Grouping).
    question: the same where a row without a picture asks the same in other letters; empty where nobody wants to know.
    """

    raw_row: int
    reject: Reject | None
    group: bytes = b""
    question: bytes = b""


class Verdict(Grouped, array_like=True, gc=False, frozen=True):
    """What one converted row is worth by itself.

    picture: name of its picture in the store; empty where it has none.
    content_digest: 16 bytes over the group and the whole conversation; equal in duplicates.
    attempts: how many answers it holds.
    line: the training row as JSON, with the line feed.
    """

    source: str = ""
    picture: str = ""
    content_digest: bytes = b""
    attempts: int = 0
    score_field_differs: bool = False
    line: bytes = b""


@dataclass(frozen=True)
class Grouping:
    """What decides over a row's split, so that rows that belong together stay together.

    pictures: what `resolve_images` found for every path that the rows name. None if it did not look: then a
    picture goes by its name, and a row without one by its prompt.
    modality: "image" or "text": whether every row has a picture, or none.
    one_prompt: the prompt is always the same: a row without a picture goes by its prompt and answer.
    near_questions: tell of rows without a picture which of them ask the same.
    """

    pictures: Mapping[str, PictureEntry] | None
    modality: str = "image"
    one_prompt: bool = False
    near_questions: bool = False

    def question_of(self, row: ShareGptRow) -> bytes:
        """Give what near questions have in common; nothing for a row with a picture."""
        if row.images or not self.near_questions:
            return b""
        return question_key(question_of(said(row.conversations), self.one_prompt)[1])

    def group_of(self, row: ShareGptRow) -> tuple[str, bytes] | Reject:
        """Give the name of a row's picture ("" for none) and the digest of its group, or why it cannot be used."""
        if bool(row.images) != (self.modality == "image"):
            return Reject("schema", f"{len(row.images)} pictures in a data set of modality {self.modality}")
        if not row.images:
            return "", hashlib.sha256("\0".join(said(row.conversations)[: 1 + self.one_prompt]).encode()).digest()
        path = row.images[0]
        if self.pictures is None:
            return path, hashlib.sha256(path.encode()).digest()
        picture = self.pictures.get(path)
        if picture is None:
            return Reject("picture_unresolved", f"{path!r} is not in the manifest")
        if picture.reason is not None:
            return Reject(f"picture_{picture.reason}", f"{path}: {picture.detail}")
        name, sha256 = name_and_digest(picture)
        return name, bytes.fromhex(sha256)


class _Origin(msgspec.Struct):
    raw_row: int


ROW = msgspec.json.Decoder(ConvertedRow)
ORIGIN = msgspec.json.Decoder(_Origin)
PACKER = msgspec.msgpack.Encoder()
VERDICTS = msgspec.msgpack.Decoder(list[Verdict])
GROUPS = msgspec.msgpack.Decoder(list[Grouped])


class CheckedRows:
    """The verdicts over all lines of a converted file, in order, kept on disk: groups are drawn when all are known.

    groups: how many raw rows each group has, of those of which no line is rejected.
    questions: by group what its rows ask, where near questions are wanted (see Grouping).
    """

    def __init__(
        self, spool: IO[bytes], converted: Path, raw_rows: int, grouping: Grouping, limits: RowLimits, processes: int
    ) -> None:
        """Check the lines of `converted`, and write the verdicts into `spool`, an empty file.

        raw_rows: how many raw rows the split has.

        Raises VlmflowError if a line does not even name its raw row.
        """
        self._spool = spool
        self._ends = [0]
        shards = _checked_shards(converted, grouping, limits, processes)
        self.groups: Counter[bytes] = Counter()
        self.questions: dict[bytes, bytes] = {}
        with Progress(f"checking {converted}", raw_rows, "rows") as progress:
            lines = chain.from_iterable(self._spooled(shards, progress))
            for _, row in groupby(lines, attrgetter("raw_row")):
                first, *others = row
                if all(line.reject is None for line in (first, *others)):
                    self.groups[first.group] += 1
                    if first.question:
                        self.questions[first.group] = first.question
            progress.advance(raw_rows - progress.count)  # the last ones may have become no line

    def _spooled(self, shards: Iterator[bytes], progress: Progress) -> Iterator[list[Grouped]]:
        for shard in shards:
            self._spool.write(shard)
            self._ends.append(self._ends[-1] + len(shard))
            lines = GROUPS.decode(shard)
            yield lines
            progress.advance(lines[-1].raw_row - progress.count)
        self._spool.flush()

    def __iter__(self) -> Iterator[Verdict]:
        self._spool.seek(0)
        for start, end in pairwise(self._ends):
            yield from VERDICTS.decode(self._spool.read(end - start))


def _checked_shards(converted: Path, grouping: Grouping, limits: RowLimits, processes: int) -> Iterator[bytes]:
    """Yield the verdicts over the lines of each shard, packed."""
    if converted.stat().st_size == 0:
        return
    with (
        converted.open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as content,
    ):
        check = partial(_verdicts_of_shard, converted, content, grouping, limits)
        yield from ordered_map(check, _shards(content), processes)


def _shards(content: mmap) -> Iterator[tuple[int, int]]:
    """Cut the file at line ends into pieces of about SHARD_BYTES."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", min(start + SHARD_BYTES, len(content) - 1)) + 1 or len(content)
        yield start, end
        start = end


def _verdicts_of_shard(
    converted: Path, content: mmap, grouping: Grouping, limits: RowLimits, shard: tuple[int, int]
) -> bytes:
    """Give the verdicts packed: a third of what pickling them costs."""
    lines = content[slice(*shard)].splitlines()
    try:
        return PACKER.encode([_verdict(line, grouping, limits) for line in lines])
    except msgspec.DecodeError as error:
        raise VlmflowError(
            f"{converted}: a line between bytes {shard[0]} and {shard[1]} is damaged: {error}",
            f"remove {converted} and run the same command again",
        ) from None


def _verdict(line: bytes, grouping: Grouping, limits: RowLimits) -> Verdict:
    try:
        row = ROW.decode(line)
    except msgspec.ValidationError as error:
        return Verdict(ORIGIN.decode(line).raw_row, Reject("schema", str(error)))
    if fault := first_fault(row, limits, marks=may_hold_marks(line, len(row.images))):
        return Verdict(row.raw_row, fault)
    found = grouping.group_of(row)
    if isinstance(found, Reject):
        return Verdict(row.raw_row, found)
    picture, group = found
    training = training_line(line, row, picture)
    return Verdict(
        raw_row=row.raw_row,
        reject=None,
        group=group,
        question=grouping.question_of(row),
        source=row.source,
        picture=picture,
        content_digest=hashlib.blake2b(conversation_in(training), digest_size=16, key=group).digest(),
        attempts=len(row.attempts),
        score_field_differs=row.score_field_differs,
        line=training,
    )
