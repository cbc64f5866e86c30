"""The question of a row, and a normal form that is equal for questions that differ only in case, spaces or marks.

The next step if a data set loses too many rows, or all: it depends on the most frequent reason.

Checks each converted row by itself, on all cores: schema, rules, pictures.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, groupby, pairwise
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.config.settings import RowLimits
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.core.processes import ordered_map
from vlmflow.core.progress import Progress
from vlmflow.pictures.manifest import PictureEntry, name_and_digest
from vlmflow.rows.chat import IMAGE_TAG, Reject, Turn, turn_texts
from vlmflow.rows.convert import OWN_FIELDS, OWN_FIELDS_LENGTH, ConvertedRow, training_line
from vlmflow.rows.sharegpt import ShareGptRow, conversation_in, first_fault, may_hold_marks, trained_characters

AROUND = " \t\n.,;:?!…"
"""Characters that are ignored at the end of a question."""


def question_of(texts: Sequence[str], one_prompt: bool) -> tuple[str, str]:
    """Return a row's question twice: exact, and normalised.

    texts: its turns without system's; the first is the question.
    one_prompt: all rows have the same question, so the first answer is added.
    """
    prompt = texts[: 1 + one_prompt]
    return "\n".join(prompt), "\n".join(map(normalised, prompt))


def normalised(text: str) -> str:
    """Return a text without differences in Unicode form (NFKC), letter case, white space, picture tags and last marks.

    A text that consists only of marks keeps them.
    """
    text = unicodedata.normalize("NFKC", text.replace(IMAGE_TAG, " ")).casefold()
    text = " ".join(text.split())
    return text.rstrip(AROUND) or text


def question_key(question: str) -> bytes:
    """Return a digest of 8 bytes (BLAKE2b), which takes less memory than the text."""
    return blake2b(question.encode(), digest_size=8).digest()


SOURCES_NAMED = 10

NEARLY_ALL = 0.9
"""If at least this share of the requested rows has a bad shape, the settings are probably wrong, not single rows."""


def advice(lost: Counter[str], asked_for: int, sources: Counter[str], quarantine: Path, *, none_left: bool) -> str:
    """Return the next step, for an error message.

    lost: the number of lost rows by reason. asked_for: the number of requested rows.
    sources: the sources that are not requested, with their numbers of rows.
    quarantine: the file of rejected rows, in the data set's own folder.
    none_left: whether no row is kept, so that allowing more rejects does not help.
    """
    settings = f"datasets.{quarantine.parent.name}"
    # A row that was not drawn has no fault.
    reasons = Counter({reason: count for reason, count in lost.items() if reason != "not_sampled"})
    leading = max(reasons, key=reasons.__getitem__, default="")
    match leading:
        case "text_only":
            return (
                f"if the rows have no pictures, remove {settings}.modality; if a picture is under another key than "
                f"image or images, name that key: {settings}.columns"
            )
        case "has_picture":
            return f"if the rows have pictures, remove {settings}.modality, and set {settings}.image_roots"
        case "source_left_out":
            return f"name sources that the rows have, {_some(sources)}, or remove this key: {settings}.sources"
        case "not_taken":
            return f"remove {settings}.take: no row has a label that calls its answer a good one"
        case "no_good_attempt":
            return f"lower {settings}.min_score: no attempt of these rows has that score"
        case "picture_path_outside":
            return (
                f"name pictures relative to a folder of {settings}.image_roots: an absolute path outside "
                f"of these, an address or '..' leads out of it; the rows are in {quarantine}"
            )
        case "special_token":
            return (
                "take the marks out of the texts: reasoning (<think>…</think>) is read at the beginning of answers "
                "only, and tool calls in turns or keys of their own; no setting keeps others, which would begin or end "
                f"a turn; the rows are in {quarantine}"
            )
        case "alternation":
            return (
                "let human and gpt speak by turns, from a question to an answer: take a greeting of gpt before the "
                "first question out of the rows, or write it into their system turn; no setting drops it; the rows are "
                f"in {quarantine}"
            )
        case "bad_shape" if reasons[leading] >= NEARLY_ALL * asked_for:
            return (
                f"choose the kind that has these rows' keys: {settings}.kind; or map its keys to those "
                f"of your file: {settings}.columns; the rows are in {quarantine}"
            )
    look = (
        f"look at {quarantine}; fix the rows in a copy of it ({settings}.fixed_rows), or, if their pictures are the "
        f"reason, {settings}.image_roots"
    )
    return look if none_left else f"{look}, or allow more rejects ({settings}.max_reject_share)"


def _some(sources: Counter[str]) -> str:
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common(SOURCES_NAMED))
    return named + (f" and {len(sources) - SOURCES_NAMED} more" if len(sources) > SOURCES_NAMED else "")


SHARD_BYTES = 1 << 20


class Grouped(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The first fields of a verdict: those that are needed before the splits are drawn.

    raw_row: the number of its raw row. reject: why the row cannot be used; if not None, all other fields are empty.
    group: all rows of a group belong to one split: SHA-256 of the picture's bytes, of the set of these if a row has
    several pictures, or of the prompt (see Grouping).
    question: equal for rows without a picture that ask nearly the same; empty if this is not wanted.
    several: the SHA-256 of each picture, in their order; empty if there is one or none.
    """

    raw_row: int
    reject: Reject | None
    group: bytes = b""
    question: bytes = b""
    several: list[bytes] = []

    @property
    def parts(self) -> list[bytes]:
        """What no other split may have of the row: the SHA-256 of each of its pictures, or that of its prompt."""
        return self.several or [self.group]


class Verdict(Grouped, array_like=True, gc=False, frozen=True):
    """The result of checking the training rows of one raw row by themselves.

    pictures: their names in the store.
    content_digest: 16 bytes over the pictures, in their order, or the prompt, and the whole conversation; equal for
    duplicates.
    attempts: the largest number of an answer, counted in the raw row.
    trained: the characters of the trained answers by score (`sharegpt.trained_characters`).
    rows: how many training rows there are. lines: these as JSON, each with its line feed.
    """

    source: str = ""
    pictures: list[str] = []
    content_digest: bytes = b""
    attempts: int = 0
    score_field_differs: bool = False
    trained: dict[int, int] = {}
    rows: int = 1
    lines: bytes = b""


@dataclass(frozen=True)
class Grouping:
    """The rule that assigns rows to groups, each of which belongs to one split.

    Rows with the same set of pictures are one group, and rows without a picture that have the same prompt.

    pictures: the entries of the image manifest by path. None without a manifest: then the path identifies a picture.
    modality: "image": every row must have a picture; "text": none may; None: each as it is.
    one_prompt: the prompt is always the same, so prompt and answer identify a row without a picture.
    near_questions: whether to find rows without a picture that ask nearly the same (`Grouped.question`).
    """

    pictures: Mapping[str, PictureEntry] | None
    modality: str | None = "image"
    one_prompt: bool = False
    near_questions: bool = False

    def question_of(self, row: ShareGptRow) -> bytes:
        """Return a key that is equal for near questions; empty for a row with a picture."""
        if row.images or not self.near_questions:
            return b""
        return question_key(question_of(turn_texts(row.conversations), self.one_prompt)[1])

    def parts_of(self, row: ShareGptRow) -> tuple[list[str], list[bytes]] | Reject:
        """Return names and digests of a row's pictures, or of its prompt if it has none; or why it cannot be used."""
        if self.modality and bool(row.images) != (self.modality == "image"):
            return Reject("schema", f"{counted(len(row.images), 'picture')} in a data set of modality {self.modality}")
        if not row.images:
            return [], [prompt_digest(row.conversations, self.one_prompt)]
        names, digests = [], []
        for path in row.images:
            picture = self._picture(path)
            if isinstance(picture, Reject):
                return picture
            name, digest = picture
            names.append(name)
            digests.append(digest)
        return names, digests

    def _picture(self, path: str) -> tuple[str, bytes] | Reject:
        """Return name and digest of a picture."""
        if self.pictures is None:
            return path, hashlib.sha256(path.encode()).digest()
        picture = self.pictures.get(path)
        if picture is None:
            return Reject("picture_unresolved", f"{path!r} is not in the manifest")
        if picture.reason is not None:
            return Reject(f"picture_{picture.reason}", f"{path}: {picture.detail}")
        name, sha256 = name_and_digest(picture)
        return name, bytes.fromhex(sha256)


def prompt_digest(turns: Sequence[Turn], one_prompt: bool) -> bytes:
    """Return the SHA-256 of a row's prompt: its first turn, and if all rows have the same one, also the answer."""
    return hashlib.sha256("\0".join(turn_texts(turns)[: 1 + one_prompt]).encode()).digest()


class _Origin(msgspec.Struct):
    raw_row: int


ROW = msgspec.json.Decoder(ConvertedRow)
ORIGIN = msgspec.json.Decoder(_Origin)
PACKER = msgspec.msgpack.Encoder()
VERDICTS = msgspec.msgpack.Decoder(list[Verdict])
GROUPS = msgspec.msgpack.Decoder(list[Grouped])


class CheckedRows:
    """The verdicts on the raw rows of a converted file, in their order.

    They are kept on disk, because splits are drawn when all groups are known.

    groups: the number of raw rows of each group; a rejected one does not count.
    several: the pictures of each group with more than one (see Grouped).
    questions: the key of each group's question, if near questions are wanted (see Grouping).
    """

    def __init__(
        self,
        spool: IO[bytes],
        converted: Path,
        raw_rows: int,
        grouping: Grouping,
        limits: RowLimits,
        processes: int,
        last_answer_only: bool = False,
    ) -> None:
        """Check the lines of `converted`, and write the verdicts to `spool`, an empty file.

        raw_rows: the number of raw rows of the split, for the progress. last_answer_only: see `trained_text`.

        Raises VlmflowError if a line is not JSON, or has no number of a raw row.
        """
        self._spool = spool
        self._ends = [0]
        verdict = partial(_verdict, grouping=grouping, limits=limits, last_answer_only=last_answer_only)
        shards = _checked_shards(converted, verdict, processes)
        self.groups: Counter[bytes] = Counter()
        self.several: dict[bytes, list[bytes]] = {}
        self.questions: dict[bytes, bytes] = {}
        with Progress(f"checking {converted}", raw_rows, "rows") as progress:
            for row in chain.from_iterable(self._spooled(shards, progress)):
                if row.reject is None:
                    self.groups[row.group] += 1
                    if row.several:
                        self.several[row.group] = row.several
                    if row.question:
                        self.questions[row.group] = row.question
            progress.advance(raw_rows - progress.count)  # the last raw rows may have no line

    @property
    def parts(self) -> frozenset[bytes]:
        """What the rows of all groups have (see Grouped)."""
        return self.parts_of(self.groups)

    def parts_of(self, groups: Iterable[bytes]) -> frozenset[bytes]:
        """Return what the rows of some groups have."""
        return frozenset(chain.from_iterable(self.several.get(group, [group]) for group in groups))

    def groups_with(self, parts: Set[bytes]) -> frozenset[bytes]:
        """Return the groups whose rows have any of some parts; of those with a single part also groups not here."""
        return frozenset(parts).union(group for group, held in self.several.items() if not parts.isdisjoint(held))

    def connected(self) -> dict[bytes, list[bytes]]:
        """Return, by group, all groups that rows with several pictures connect with it, if there are others.

        Groups are connected that have a common picture, and those that are connected with the same one.
        """
        above: dict[bytes, bytes] = {}

        def top(part: bytes) -> bytes:
            while (parent := above.setdefault(part, part)) != part:
                above[part] = part = above[parent]
            return part

        for held in self.several.values():
            for part in held[1:]:
                above[top(part)] = top(held[0])
        members: dict[bytes, list[bytes]] = {}
        for group in self.groups:
            part = self.several.get(group, [group])[0]
            if part in above:
                members.setdefault(top(part), []).append(group)
        return {group: groups for groups in members.values() if len(groups) > 1 for group in groups}

    def _spooled(self, shards: Iterator[bytes], progress: Progress) -> Iterator[list[Grouped]]:
        for shard in shards:
            self._spool.write(shard)
            self._ends.append(self._ends[-1] + len(shard))
            rows = GROUPS.decode(shard)
            yield rows
            progress.advance(rows[-1].raw_row - progress.count)
        self._spool.flush()

    def __iter__(self) -> Iterator[Verdict]:
        self._spool.seek(0)
        for start, end in pairwise(self._ends):
            yield from VERDICTS.decode(self._spool.read(end - start))


def _checked_shards(converted: Path, verdict: Callable[[bytes], Verdict], processes: int) -> Iterator[bytes]:
    """Yield the verdicts on the raw rows of each shard, as MessagePack."""
    if converted.stat().st_size == 0:
        return
    with (
        converted.open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as content,
    ):
        check = partial(_verdicts_of_shard, converted, content, verdict)
        yield from ordered_map(check, _shards(content), processes)


def _shards(content: mmap) -> Iterator[tuple[int, int]]:
    """Yield start and end, in bytes, of consecutive pieces of about SHARD_BYTES that end with a raw row's last line."""
    start = 0
    while start < len(content):
        end = _line_end(content, start + SHARD_BYTES)
        while end < len(content) and (own := _own_fields(content, end)):
            next_end = _line_end(content, end)
            if own != _own_fields(content, next_end):
                break
            end = next_end
        yield start, end
        start = end


def _line_end(content: mmap, start: int) -> int:
    return content.find(b"\n", min(start, len(content) - 1)) + 1 or len(content)


def _own_fields(content: mmap, end: int) -> bytes | None:
    """Return OWN_FIELDS of the line that ends there, which are equal in all lines of a raw row."""
    match = OWN_FIELDS.search(content, max(0, end - OWN_FIELDS_LENGTH), end)
    return match[0] if match else None


def _verdicts_of_shard(
    converted: Path, content: mmap, verdict: Callable[[bytes], Verdict], shard: tuple[int, int]
) -> bytes:
    """Return the verdicts as MessagePack, in a third of the time of pickle."""
    lines = content[slice(*shard)].splitlines()
    try:
        return PACKER.encode([_of_raw_row(*made) for _, made in groupby(map(verdict, lines), attrgetter("raw_row"))])
    except msgspec.DecodeError as error:
        raise VlmflowError(
            f"{converted}: a line between bytes {shard[0]} and {shard[1]} is damaged: {error}",
            f"remove {converted} and run the same command again",
        ) from None


def _of_raw_row(first: Verdict, *others: Verdict) -> Verdict:
    """Return the verdict on a raw row. first, others: those on its lines; one that is rejected rejects all."""
    if not others:
        return first
    lines = [first, *others]
    if rejected := next((line for line in lines if line.reject is not None), None):
        return rejected
    contents = b"".join(line.content_digest for line in lines)
    return msgspec.structs.replace(
        first,
        content_digest=blake2b(contents, digest_size=16).digest(),
        attempts=max(line.attempts for line in lines),
        trained=dict(sum((Counter(line.trained) for line in lines), Counter[int]())),
        rows=len(lines),
        lines=b"".join(line.lines for line in lines),
    )


def _verdict(line: bytes, grouping: Grouping, limits: RowLimits, last_answer_only: bool) -> Verdict:
    try:
        row = ROW.decode(line)
    except msgspec.ValidationError as error:
        return Verdict(ORIGIN.decode(line).raw_row, Reject("schema", str(error)))
    if fault := first_fault(row, limits, marks=may_hold_marks(line, len(row.images))):
        return Verdict(row.raw_row, fault)
    grouped = grouping.parts_of(row)
    if isinstance(grouped, Reject):
        return Verdict(row.raw_row, grouped)
    pictures, parts = grouped
    training = training_line(line, row, pictures)
    group = in_order = parts[0]
    if len(parts) > 1:
        alike = sorted(set(parts))
        group = hashlib.sha256(b"".join(alike)).digest() if len(alike) > 1 else group
        in_order = hashlib.sha256(b"".join(parts)).digest()
    return Verdict(
        raw_row=row.raw_row,
        reject=None,
        group=group,
        question=grouping.question_of(row),
        several=parts if len(parts) > 1 else [],
        source=row.source,
        pictures=pictures,
        content_digest=blake2b(conversation_in(training), digest_size=16, key=in_order).digest(),
        attempts=int(row.attempts[-1]),
        score_field_differs=row.score_field_differs,
        trained=trained_characters(row.conversations, row.scores, last_answer_only),
        lines=training,
    )
