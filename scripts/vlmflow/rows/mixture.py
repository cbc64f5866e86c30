"""Mixes the validated rows of several data sets: draws train rows, and keeps out what is held out by any of them."""

import hashlib
import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.config.mixture_settings import amount_of
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.integrity import digests_of
from vlmflow.core.printable import counted
from vlmflow.pictures.image_manifest import (
    KnownPicture,
    PictureEntry,
    contents_digest,
    name_and_digest,
    read_picture_manifest,
)
from vlmflow.pictures.picture_counts import picture_counts
from vlmflow.rows.chat import ASSISTANT
from vlmflow.rows.data_rows import lines_of
from vlmflow.rows.mixture_names import id_in_mixture, picture_in_mixture, source_in_mixture
from vlmflow.rows.rejects import Reject
from vlmflow.rows.row_check import Grouping
from vlmflow.rows.row_counts import QuarantinedRow
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.stats import MIXTURE, MemberStats, RawFile, RulesUsed, SplitCounts, Stats
from vlmflow.rows.trained_text import trained_characters
from vlmflow.rows.unread_keys import Found

log = logging.getLogger("vlmflow")

SPLITS = ("train", "val", "test")

BITS = 128
"""Of the hash that draws rows."""


@dataclass(frozen=True)
class Member:
    """A data set that is mixed.

    drawn: how much of its train rows: a value of `mix`. folder: its validated rows. stats: its account. manifests: its
    image manifests; none without pictures.
    """

    name: str
    drawn: str
    folder: Path
    stats: Stats
    manifests: Sequence[Path] = ()

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The SHA-256 of its usable pictures, by their names in its store."""
        entries = chain.from_iterable(read_picture_manifest(manifest, KnownPicture) for manifest in self.manifests)
        named = (name_and_digest(entry) for entry in entries if entry.name is not None)
        return {name: bytes.fromhex(sha256) for name, sha256 in named}

    def file(self, split: str) -> Path:
        """Return the file of a split."""
        return self.folder / f"{split}.jsonl"

    def rows(self, split: str) -> Iterator[ShareGptRow]:
        """Yield the rows of a split."""
        return lines_of(self.file(split), ShareGptRow)

    def holds(self, row: ShareGptRow) -> list[bytes]:
        """Return what no two splits may share: the SHA-256 of a row's pictures, or of its prompt if it has none.

        Raises VlmflowError if no image manifest has a picture.
        """
        if not row.images:
            found = Grouping(None, None, self.stats.one_prompt).parts_of(row)
            assert not isinstance(found, Reject)
            return found[1]
        try:
            return [self.pictures[name] for name in row.images]
        except KeyError as error:
            raise VlmflowError(
                f"{self.folder}: row {row.id}: no image manifest has picture {error}",
                f"check its pictures again: make refresh-pictures DATASET={self.name}",
            ) from None


@dataclass
class _Counts:
    """The results of one data set's rows of one split.

    written: lines. named: the pictures that the rows name. The tables are of kept rows.
    """

    rows_in: int = 0
    kept: int = 0
    written: int = 0
    named: set[str] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)

    def of_split(self) -> SplitCounts:
        return SplitCounts(self.rows_in, self.kept, dict(sorted(self.rejected.items())))


class _Writer:
    """Writes the mixture's files.

    named: by split, the pictures in its rows with the number of rows. trained: see `RowStats.trained_characters`.
    """

    def __init__(self, folder: Path, stack: ExitStack, last_answer_only: bool) -> None:
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl")) for name in (*SPLITS, "quarantine")
        }
        self._last_answer_only = last_answer_only
        self.named: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.trained: Counter[int] = Counter()

    def write(self, member: Member, split: str, row: ShareGptRow, copy: int) -> None:
        """Write a row to a split under its names in the mixture."""
        images = [picture_in_mixture(member.name, name) for name in row.images]
        if member.stats.last_answer_only and not self._last_answer_only:
            row = _with_last_trained(row)
        row = msgspec.structs.replace(
            row, id=id_in_mixture(member.name, row.id, copy), source=source_in_mixture(member.name, row.source)
        )
        self._files[split].write(as_line(row, images) + b"\n")
        self.named[split].update(set(images))
        if split == "train":
            self.trained.update(trained_characters(row, self._last_answer_only))

    def reject(self, member: Member, split: str, number: int, row: ShareGptRow, reject: Reject) -> None:
        """Write a row that is kept out to the quarantine. number: its place in its file, from 0."""
        line = QuarantinedRow(
            split=split,
            row=number,
            reason=reject.reason,
            detail=reject.detail,
            file=str(member.file(split)),
            file_row=number,
            start=None,
            end=None,
            checksum="",
            raw=msgspec.Raw(as_line(row, row.images)),
        )
        self._files["quarantine"].write(msgspec.json.encode(line) + b"\n")


def mix_rows(members: Sequence[Member], folder: Path, manifests: Mapping[str, Path], seed: int) -> Stats:
    """Write train, val, test and quarantine of a mixture into `folder`, and its image manifests; return the account.

    members: the data sets, at least one. manifests: the image manifest to write, by split: the pictures of its rows.

    Rows stay in the order of their files, one data set after the other. If some of the data sets train only last
    answers, their rows say so themselves. Memory grows with pictures, held-out prompts and the rows of a number that
    is drawn, not with all rows.

    Raises VlmflowError if a data set has fewer rows than are to be drawn, if none of its train rows or none of all val
    rows is left, or if its pictures are not those that its account records.
    """
    last_answer_only = all(member.stats.last_answer_only for member in members)
    counts = {member.name: {split: _Counts() for split in SPLITS} for member in members}
    held: dict[str, set[bytes]] = {}
    with ExitStack() as stack:
        writer = _Writer(folder, stack, last_answer_only)
        for split in ("test", "val", "train"):
            before, own = dict(held), set[bytes]()
            for member in members:
                _take(member, split, before, own, seed, counts[member.name][split], writer)
            held[split] = own
        for member in members:
            _refuse_other_pictures(member, counts[member.name])
            if not counts[member.name]["train"].kept:
                raise VlmflowError(
                    f"none of the {counts[member.name]['train'].rows_in} train rows of {member.name} is drawn and not "
                    f"held out by another data set: {dict(counts[member.name]['train'].rejected)}",
                    f"take more of it (datasets.NAME.mix.{member.name}: all), or leave it out",
                )
        if not any(counts[member.name]["val"].kept for member in members):
            raise VlmflowError(
                f"{folder / 'val.jsonl'} would be empty: all val rows share a picture or prompt with a test row",
                "mix data sets whose splits are of one draw, or have other pictures",
            )
        pictures = _write_manifests(members, manifests, writer.named, stack)
    return _stats(members, folder, manifests, seed, counts, writer, pictures)


def _take(
    member: Member,
    split: str,
    held: Mapping[str, set[bytes]],
    own: set[bytes],
    seed: int,
    counts: _Counts,
    writer: _Writer,
) -> None:
    """Write the rows of one split of a data set. held: what earlier splits hold. own: gets what this one holds."""
    copies = _copies(member, held, seed) if split == "train" else lambda row: 1
    for copy in range(1, _most_copies(member) + 1 if split == "train" else 2):
        for number, row in enumerate(member.rows(split)):
            holds = member.holds(row)
            reject = _shared(member, row, holds, held)
            drawn = 0 if reject else copies(row)
            if copy <= drawn:
                writer.write(member, split, row, copy)
                counts.written += 1
            if copy > 1:
                continue
            counts.rows_in += 1
            counts.named.update(row.images)
            if split != "train":
                own.update(holds)
            if reject:
                writer.reject(member, split, number, row, reject)
                counts.rejected[reject.reason] += 1
            elif not drawn:
                counts.rejected["not_drawn"] += 1
            else:
                counts.kept += 1
                counts.sources[source_in_mixture(member.name, row.source)] += 1
                counts.attempts[int(row.attempts[-1])] += 1


def _shared(member: Member, row: ShareGptRow, holds: list[bytes], held: Mapping[str, set[bytes]]) -> Reject | None:
    """Return why a row is in no split: an earlier one holds one of its pictures, or its prompt. held: by split."""
    for split, taken in held.items():
        for place, one in enumerate(holds):
            if one in taken:
                what = f"{row.images[place]} is a picture" if row.images else "its prompt is one"
                return Reject(f"in_{split}_split", f"{member.name}: {what} of the mixture's {split} split")
    return None


def _copies(member: Member, held: Mapping[str, set[bytes]], seed: int) -> Callable[[ShareGptRow], int]:
    """Return the function that gives how often a train row is written, if it is in no other split.

    Raises VlmflowError if there are fewer rows than are to be drawn.
    """
    amount = amount_of(member.drawn)
    key = str(seed).encode()

    def place(row: ShareGptRow) -> int:
        name = id_in_mixture(member.name, row.id)
        return int.from_bytes(hashlib.blake2b(name.encode(), key=key, digest_size=BITS // 8).digest())

    if amount.share is not None:
        whole = int(amount.share)
        below = math.ceil((amount.share - whole) * 2**BITS)
        return lambda row: whole + (place(row) < below)
    assert amount.rows is not None
    left = (row for row in member.rows("train") if not _shared(member, row, member.holds(row), held))
    smallest = heapq.nsmallest(amount.rows, map(place, left))
    if len(smallest) < amount.rows:
        raise VlmflowError(
            f"datasets.NAME.mix.{member.name}: {member.drawn}, but {member.file('train')} has "
            f"{counted(len(smallest), 'row')} that no data set of the mixture holds out",
            f"write {member.name}: all, or at most {counted(len(smallest), 'row')}; 200% takes each row twice",
        )
    last = smallest[-1]
    return lambda row: int(place(row) <= last)


def _most_copies(member: Member) -> int:
    return math.ceil(amount_of(member.drawn).share or 1)


def _with_last_trained(row: ShareGptRow) -> ShareGptRow:
    """Return a row that says that only its last answer is trained, for a mixture in which others train all."""
    asked = [number for number, turn in enumerate(row.conversations) if turn.speaker == "human"]
    if len(asked) == 1:
        return row
    turns = [
        msgspec.structs.replace(turn, loss=number > asked[-1]) if turn.speaker in ASSISTANT else turn
        for number, turn in enumerate(row.conversations)
    ]
    return msgspec.structs.replace(row, conversations=turns)


def _write_manifests(
    members: Sequence[Member], manifests: Mapping[str, Path], named: Mapping[str, Counter[str]], stack: ExitStack
) -> dict[str, bytes]:
    """Write each split's pictures; return the SHA-256 of those of train and val, by name.

    named: by split, the pictures in the mixture's rows with the number of rows.
    """
    files = {split: stack.enter_context(whole_file(manifest)) for split, manifest in manifests.items()}
    left = {split: dict(names) for split, names in named.items()}
    contents: dict[str, bytes] = {}
    encode = msgspec.json.Encoder().encode
    for member in members:
        for entry in chain.from_iterable(map(read_picture_manifest, member.manifests)):
            if entry.name is None:
                continue
            name = picture_in_mixture(member.name, entry.name)
            for split, names in left.items():
                if (rows := names.pop(name, 0)) != 0:
                    files[split].write(encode(_renamed(entry, name, rows)) + b"\n")
                    if split != "test":
                        contents[name] = member.pictures[entry.name]
    return contents


def _refuse_other_pictures(member: Member, counts: Mapping[str, _Counts]) -> None:
    """Refuse pictures of a data set's train and val that are others than its account records."""
    named = counts["train"].named | counts["val"].named
    if contents_digest({name: member.pictures[name] for name in named}) != member.stats.digests["pictures"]:
        raise VlmflowError(
            f"{', '.join(map(str, member.manifests))}: {member.folder / 'stats.json'} records other digests for these "
            "pictures",
            f"check them again: make refresh-pictures DATASET={member.name}",
        )


def _renamed(entry: PictureEntry, name: str, rows: int) -> PictureEntry:
    """Return the entry of a picture as the mixture's rows write its name."""
    return msgspec.structs.replace(entry, path=name, name=name, rows=rows)


def _stats(
    members: Sequence[Member],
    folder: Path,
    manifests: Mapping[str, Path],
    seed: int,
    counts: Mapping[str, Mapping[str, _Counts]],
    writer: _Writer,
    pictures: Mapping[str, bytes],
) -> Stats:
    def of_all(split: str) -> list[_Counts]:
        return [counts[member.name][split] for member in members]

    def sum_of(split: str) -> SplitCounts:
        rejected = sum((one.rejected for one in of_all(split)), Counter[str]())
        kept = sum(one.kept for one in of_all(split))
        return SplitCounts(sum(one.rows_in for one in of_all(split)), kept, dict(sorted(rejected.items())))

    named = [f"{name}.jsonl" for name in (*SPLITS, "quarantine")]
    limits = [member.stats.settings.row_limits for member in members]
    last_answer_only = all(member.stats.last_answer_only for member in members)
    timestep = all(member.stats.form == "timestep" for member in members)
    return Stats(
        dataset=folder.name,
        kind=MIXTURE,
        modality=None if any(member.stats.pictures_checked for member in members) else "text",
        skip_images=False,
        form="timestep" if timestep else "trajectory",
        mended=[file for member in members for file in member.stats.mended],
        settings=RulesUsed(
            max_history_rounds=None,
            val_share=0.0,
            seed=seed,
            max_reject_share=0.0,
            row_limits={key: max(one[key] for one in limits) for key in limits[0]},
            test_share=0.0,
            train_on="last" if last_answer_only and not timestep else "all",
        ),
        members={member.name: _of_member(member, counts[member.name]) for member in members},
        train=sum_of("train"),
        val=sum_of("val"),
        test=sum_of("test"),
        examples={split: sum(one.written for one in of_all(split)) for split in SPLITS},
        kept_by_source={
            split: dict(sorted(sum((one.sources for one in of_all(split)), Counter[str]()).items())) for split in SPLITS
        },
        kept_by_attempts={
            split: dict(sorted(sum((one.attempts for one in of_all(split)), Counter[int]()).items()))
            for split in SPLITS
        },
        trained_characters=dict(sorted(writer.trained.items())),
        mended_rows=dict.fromkeys(SPLITS, 0),
        score_field_differs=dict.fromkeys(SPLITS, 0),
        pictures={split: picture_counts(read_picture_manifest(manifests[split])) for split in SPLITS},
        unread={split: Found().counts(()) for split in SPLITS},
        digests={**digests_of(folder, named), "pictures": contents_digest(pictures)},
        raw=_raw_files(members),
    )


def _of_member(member: Member, counts: Mapping[str, _Counts]) -> MemberStats:
    return MemberStats(
        drawn=member.drawn,
        kind=member.stats.kind,
        form=member.stats.form,
        train_on=member.stats.settings.train_on,
        **{split: counts[split].of_split() for split in SPLITS},
        examples={split: counts[split].written for split in SPLITS},
        digests={f"{split}.jsonl": member.stats.digests[f"{split}.jsonl"] for split in SPLITS},
        mended=member.stats.mended,
    )


def _raw_files(members: Sequence[Member]) -> dict[str, list[RawFile]]:
    """Return the raw files of all data sets by their raw split."""
    found: dict[str, list[RawFile]] = {}
    for member in members:
        for split, files in member.stats.raw.items():
            found.setdefault(split, []).extend(files)
    return found
