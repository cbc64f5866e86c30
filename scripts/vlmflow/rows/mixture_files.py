"""The names that rows, their sources and their pictures have in a mixture: that of their data set comes first.

A data set of a mixture: its validated rows, and what no other split may have of them.

Writes the files of a mixture: rows and pictures under its own names.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.core.account import read_lines
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.pictures.manifest import KnownPicture, contents_digest, name_and_digest, read_picture_manifest
from vlmflow.raw.named import UNKNOWN_SOURCE
from vlmflow.rows.chat import ASSISTANT, Reject, Turn, places_answered
from vlmflow.rows.row_check import prompt_digest
from vlmflow.rows.sharegpt import ENCODER, ShareGptRow, lines_of, trained_characters
from vlmflow.rows.stats import QuarantinedRow, Stats

MARK = ":"
"""It ends a data set's name in an id; neither names of data sets nor ids of rows have it."""


def id_in_mixture(member: str, identity: str, copy: int = 1) -> str:
    """Return the id of a row; the copies of one that is repeated have different ones.

    It ends as the row's own id, which may name an attempt or a single turn. copy: counted from 1.
    """
    return f"{member}{MARK}{identity}" if copy == 1 else f"{member}{MARK}{copy}{MARK}{identity}"


def member_of(identity: str) -> str:
    """Return the data set that a row of a mixture is from; "" for a row of any other data set."""
    return identity.partition(MARK)[0] if MARK in identity else ""


def own_id(identity: str) -> str:
    """Return the id that a row has in its own data set."""
    return identity.rpartition(MARK)[2]


def source_in_mixture(member: str, source: str) -> str:
    """Return the source of a row; that of rows that name none is their data set."""
    return member if source == UNKNOWN_SOURCE else f"{member}/{source}"


def sources_of(identity: str, source: str) -> list[str]:
    """Return under which names a row is reported by source: its own, and in a mixture also that of its data set.

    identity, source: those of the row.
    """
    return sorted({source, member_of(identity) or source})


def picture_in_mixture(member: str, name: str) -> str:
    """Return a picture's name in the store of the mixture, which has a link to that of the data set."""
    return f"{member}/{name}"


TURNS = msgspec.json.Decoder(list[Turn])


class MixedRow(ShareGptRow, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A validated row whose turns stay the bytes that they are, for few rows need more: mixing changes only names."""

    attempts: list[int]  # type: ignore[assignment]  # a validated row has integers, and they are written again
    scores: list[int]  # type: ignore[assignment]
    conversations: msgspec.Raw  # type: ignore[assignment]

    @property
    def turns(self) -> list[Turn]:
        """Its turns, decoded."""
        return TURNS.decode(self.conversations)


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
    def one_prompt(self) -> bool:
        """Whether all its rows have the same prompt."""
        return self.stats.one_prompt

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The SHA-256 of its usable pictures, by their names in its store."""
        entries = chain.from_iterable(read_lines(manifest, KnownPicture) for manifest in self.manifests)
        named = (name_and_digest(entry) for entry in entries if entry.name is not None)
        return {name: bytes.fromhex(sha256) for name, sha256 in named}

    def file(self, split: str) -> Path:
        """Return where the validated rows of a split are; an empty split has an empty file."""
        return self.folder / f"{split}.jsonl"

    def rows(self, split: str) -> Iterator[MixedRow]:
        """Yield the validated rows of a split, in the order of its file."""
        return lines_of(self.file(split), MixedRow)

    def parts_of(self, row: MixedRow) -> list[bytes]:
        """Return what no two splits may share of a row (`row_check.Grouped.parts`).

        Raises VlmflowError if no image manifest has a picture.
        """
        if not row.images:
            return [prompt_digest(row.turns, self.one_prompt)]
        try:
            return [self.pictures[name] for name in row.images]
        except KeyError as error:
            raise VlmflowError(
                f"{self.folder}: row {row.id}: no image manifest has picture {error}",
                f"check its pictures again: vlmflow refresh-pictures FILE {self.name}",
            ) from None

    def refuse_other_pictures(self, named: Set[str]) -> None:
        """Refuse pictures that are others than its account records. named: those of its train and val rows."""
        if contents_digest({name: self.pictures[name] for name in named}) != self.stats.digests["pictures"]:
            raise VlmflowError(
                f"{', '.join(map(str, self.manifests))}: {self.folder / 'stats.json'} records other digests for these "
                "pictures",
                f"check them again: vlmflow refresh-pictures FILE {self.name}",
            )


SPLITS = ("train", "val", "test")


class MixtureWriter:
    """Writes the mixture's files.

    last_answer_only: whether the mixture trains the last answers alone. named: by split, the pictures in its rows with
    the number of rows. trained: see `RowStats.trained_characters`.
    """

    def __init__(self, folder: Path, stack: ExitStack, last_answer_only: bool) -> None:
        """Begin the files in `folder`."""
        self._stack = stack
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl")) for name in (*SPLITS, "quarantine")
        }
        self.last_answer_only = last_answer_only
        self.named: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.trained: Counter[int] = Counter()

    def write(self, member: Member, split: str, row: MixedRow, copy: int) -> None:
        """Write a row to a split under its names in the mixture."""
        images = [picture_in_mixture(member.name, name) for name in row.images]
        if member.stats.last_answer_only and not self.last_answer_only:
            row = _with_last_trained(row)
        row = msgspec.structs.replace(
            row,
            id=id_in_mixture(member.name, row.id, copy),
            source=source_in_mixture(member.name, row.source),
            images=images,
        )
        self._files[split].write(ENCODER.encode(row) + b"\n")
        named = self.named[split]
        for name in set(images):
            named[name] += 1
        if row.scores and split == "train":
            for score, characters in trained_characters(row.turns, row.scores, self.last_answer_only).items():
                self.trained[score] += characters

    def reject(self, member: Member, split: str, number: int, row: MixedRow, reject: Reject) -> None:
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
            raw=msgspec.Raw(ENCODER.encode(row)),
        )
        self._files["quarantine"].write(msgspec.json.encode(line) + b"\n")

    def write_manifests(self, members: Sequence[Member], manifests: Mapping[str, Path]) -> dict[str, bytes]:
        """Write the image manifest of each split; return the SHA-256 of the pictures of train and val, by name.

        Rows name the pictures as the store does, so both names in an entry are equal.
        """
        files = {split: self._stack.enter_context(whole_file(manifest)) for split, manifest in manifests.items()}
        left = {split: dict(names) for split, names in self.named.items()}
        contents: dict[str, bytes] = {}
        encode = msgspec.json.Encoder().encode
        for member in members:
            for entry in chain.from_iterable(map(read_picture_manifest, member.manifests)):
                if entry.name is None:
                    continue
                name = picture_in_mixture(member.name, entry.name)
                for split, names in left.items():
                    if (rows := names.pop(name, 0)) != 0:
                        renamed = msgspec.structs.replace(entry, path=name, name=name, rows=rows)
                        files[split].write(encode(renamed) + b"\n")
                        if split != "test":
                            contents[name] = member.pictures[entry.name]
        return contents


def _with_last_trained(row: MixedRow) -> MixedRow:
    """Return a row that says that only its last answer is trained, for a mixture in which others train all."""
    turns = row.turns
    *earlier, (first, _) = places_answered(turns)
    if not earlier:
        return row
    for number, turn in enumerate(turns):
        if turn.speaker in ASSISTANT:
            turn.loss = number >= first and turn.loss is not False
    return msgspec.structs.replace(row, conversations=msgspec.Raw(ENCODER.encode(turns)))
