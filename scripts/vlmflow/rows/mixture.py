"""Mixes the validated rows of several data sets: draws train rows, and keeps out what is held out by any of them."""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vlmflow.config.mixture_settings import amount_of
from vlmflow.core.account import digests_of
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.pictures.manifest import contents_digest, picture_counts, read_picture_manifest
from vlmflow.rows.chat import Reject
from vlmflow.rows.holdout import shared
from vlmflow.rows.mixture_files import SPLITS, Member, MixedRow, MixtureWriter, id_in_mixture, source_in_mixture
from vlmflow.rows.stats import MIXTURE, MemberStats, RawFile, RulesUsed, SplitCounts, Stats
from vlmflow.rows.strict_rows import Found

Key = TypeVar("Key", str, int)

BITS = 128
"""Of the hash that draws rows."""


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


def _summed(tables: Iterable[Counter[Key]]) -> dict[Key, int]:
    """Return the sum of some tables, sorted by key."""
    return dict(sorted(sum(tables, Counter[Key]()).items()))


def _split_counts(of: Sequence[_Counts]) -> SplitCounts:
    rejected = _summed(part.rejected for part in of)
    return SplitCounts(sum(part.rows_in for part in of), sum(part.kept for part in of), rejected)


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
        writer = MixtureWriter(folder, stack, last_answer_only)
        for split in ("test", "val", "train"):
            before, own = dict(held), set[bytes]()
            for member in members:
                _take(member, split, before, own, seed, counts[member.name][split], writer)
            held[split] = own
        for member in members:
            member.refuse_other_pictures(counts[member.name]["train"].named | counts[member.name]["val"].named)
            if not counts[member.name]["train"].kept:
                raise VlmflowError(
                    f"none of the {counts[member.name]['train'].rows_in} train rows of {member.name} is drawn and not "
                    f"held out by another data set: {dict(counts[member.name]['train'].rejected)}",
                    f"take more of it (datasets.NAME.mix.{member.name}: all), or leave it out",
                )
        if not any(counts[member.name]["val"].kept for member in members):
            raise VlmflowError(
                f"{folder / 'val.jsonl'} would be empty: all val rows share a picture or prompt with a test row",
                "give the data sets other splits (val, val_share, test, test_share of each)",
            )
        pictures = writer.write_manifests(members, manifests)
    return _stats(members, folder, manifests, seed, counts, writer, pictures)


def _take(
    member: Member,
    split: str,
    held: Mapping[str, set[bytes]],
    own: set[bytes],
    seed: int,
    counts: _Counts,
    writer: MixtureWriter,
) -> None:
    """Write the rows of one split of a data set. held: the parts that earlier splits have. own: gets those of this."""
    copies = _copies(member, held, seed) if split == "train" else lambda row: 1
    most = math.ceil(amount_of(member.drawn).share or 1) if split == "train" else 1
    for copy in range(1, most + 1):
        for number, row in enumerate(member.rows(split)):
            parts = member.parts_of(row)
            reject = _shared(member, row, parts, held)
            drawn = 0 if reject else copies(row)
            if copy <= drawn:
                writer.write(member, split, row, copy)
                counts.written += 1
            if copy > 1:
                continue
            counts.rows_in += 1
            counts.named.update(row.images)
            if split != "train":
                own.update(parts)
            if reject:
                writer.reject(member, split, number, row, reject)
                counts.rejected[reject.reason] += 1
            elif not drawn:
                counts.rejected["not_drawn"] += 1
            else:
                counts.kept += 1
                counts.sources[source_in_mixture(member.name, row.source)] += 1
                counts.attempts[row.attempts[-1]] += 1


def _shared(member: Member, row: MixedRow, parts: list[bytes], held: Mapping[str, set[bytes]]) -> Reject | None:
    """Return why a row is in no split: an earlier one has one of its pictures, or its prompt. held: parts, by split."""
    for split, taken in held.items():
        if common := shared(row.images, parts, taken):
            return Reject(f"in_{split}_split", f"{member.name}: {common} of the mixture's {split} split")
    return None


def _copies(member: Member, held: Mapping[str, set[bytes]], seed: int) -> Callable[[MixedRow], int]:
    """Return the function that gives how often a train row is written, if it is in no other split.

    Raises VlmflowError if there are fewer rows than are to be drawn.
    """
    amount = amount_of(member.drawn)
    key = str(seed).encode()

    def rank(row: MixedRow) -> int:
        name = id_in_mixture(member.name, row.id)
        return int.from_bytes(hashlib.blake2b(name.encode(), key=key, digest_size=BITS // 8).digest())

    if amount.share is not None:
        whole = int(amount.share)
        below = math.ceil((amount.share - whole) * 2**BITS)
        return lambda row: whole + (rank(row) < below)
    assert amount.rows is not None
    left = (row for row in member.rows("train") if not _shared(member, row, member.parts_of(row), held))
    smallest = heapq.nsmallest(amount.rows, map(rank, left))
    if len(smallest) < amount.rows:
        raise VlmflowError(
            f"datasets.NAME.mix.{member.name}: {member.drawn}, but {member.file('train')} has "
            f"{counted(len(smallest), 'row')} that no data set of the mixture holds out",
            f"write {member.name}: all, or at most {counted(len(smallest), 'row')}; 200% takes each row twice",
        )
    last = smallest[-1]
    return lambda row: int(rank(row) <= last)


def _stats(
    members: Sequence[Member],
    folder: Path,
    manifests: Mapping[str, Path],
    seed: int,
    counts: Mapping[str, Mapping[str, _Counts]],
    writer: MixtureWriter,
    pictures: Mapping[str, bytes],
) -> Stats:
    def of_all(split: str) -> list[_Counts]:
        return [counts[member.name][split] for member in members]

    named = [f"{name}.jsonl" for name in (*SPLITS, "quarantine")]
    limits = [member.stats.settings.row_limits for member in members]
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
            row_limits={key: max(limit[key] for limit in limits) for key in limits[0]},
            test_share=0.0,
            train_on="last" if writer.last_answer_only and not timestep else "all",
        ),
        members={member.name: _of_member(member, counts[member.name]) for member in members},
        train=_split_counts(of_all("train")),
        val=_split_counts(of_all("val")),
        test=_split_counts(of_all("test")),
        examples={split: sum(part.written for part in of_all(split)) for split in SPLITS},
        kept_by_source={split: _summed(part.sources for part in of_all(split)) for split in SPLITS},
        kept_by_attempts={split: _summed(part.attempts for part in of_all(split)) for split in SPLITS},
        trained_characters=_summed([writer.trained]),
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
        **{split: _split_counts([counts[split]]) for split in SPLITS},
        examples={split: counts[split].written for split in SPLITS},
        digests={f"{split}.jsonl": member.stats.digests[f"{split}.jsonl"] for split in SPLITS},
        mended=member.stats.mended,
    )


def _raw_files(members: Sequence[Member]) -> dict[str, list[RawFile]]:
    """Return the raw files of all data sets by their raw split."""
    splits = dict.fromkeys(split for member in members for split in member.stats.raw)
    return {split: [file for member in members for file in member.stats.raw.get(split, ())] for split in splits}
