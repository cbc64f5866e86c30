"""Reads a split of a data set, and chooses its rows to evaluate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmflow.config.raw_forms import form_of, has_feedback
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.evaluation.accounts import LeftOut
from vlmflow.evaluation.evaluate import ChosenRow, choose_rows, counts_of
from vlmflow.pictures.image_manifest import name_and_digest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.rows.data_rows import lines_of
from vlmflow.rows.gold import gold_answers
from vlmflow.rows.halves import Part, group_of, half_of
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import entries_named, pictures_in


@dataclass(frozen=True)
class RawRows:
    """Raw files by split, and those of edited rows; none of both where raw rows have no gold answer."""

    splits: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    mended: Sequence[Path] = ()


@dataclass(frozen=True)
class ChosenSplit:
    """The rows of a split that are evaluated. out: the others, with the reason.

    dataset, kind: its name, and the kind of its raw rows. rows_digest: SHA-256 of the split's file. pictures: the store
    of its pictures. feedback: whether the human's later turns are feedback. last_answer_only: whether only a row's last
    answer is trained. gold: the gold answers that raw rows have beside their turns, by the ids of rows.
    """

    rows: list[ChosenRow]
    out: list[LeftOut]
    dataset: str
    kind: str
    rows_digest: str
    pictures: Path
    feedback: bool
    last_answer_only: bool
    gold: Mapping[str, str]

    @property
    def loss_scale(self) -> str:
        """The value of ms-swift's `loss_scale` that scores what is compared: the last answer, or all of them."""
        return "last_round" if self.feedback or self.last_answer_only else "default"


def choose_from_split(
    file: Path,
    stats: Path,
    picture_store: Path,
    manifests: Sequence[Path],
    raw: RawRows,
    *,
    feedback: bool | None,
    count: int,
    key: str,
    seed: int,
    part: Part | None,
) -> ChosenSplit:
    """Choose rows of a split (data/DATASET/SPLIT.jsonl).

    stats: the data set's account. picture_store: the folder of all picture stores. manifests: the image manifests; none
    if rows have no pictures. raw: where gold answers are. feedback: the run's evaluate.feedback. count, key, seed: of
    the draw (`choose_rows`). part: which half of val is wanted (`halves`); None for all rows.

    Raises VlmflowError if rows, raw rows or pictures have changed, or no row can be evaluated.
    """
    account = read_account(stats, Stats)
    refuse_other_rows(stats, [file])
    store = picture_store / account.dataset
    named = pictures_in(file)
    entries = entries_named(named, manifests)
    if unknown := sorted(named - entries.keys()):
        raise VlmflowError(
            f"{file}: {len(unknown)} pictures are in no image manifest ({', '.join(map(str, manifests)) or 'none'}): "
            f"{', '.join(unknown[:3])}",
            f"check them again: make refresh-pictures DATASET={account.dataset}",
        )
    refuse_changed_pictures(store, entries.values())
    has = has_feedback(account.kind) if feedback is None else feedback
    last_answer_only = account.last_answer_only
    form = form_of(account.kind)
    read_gold = form.gold
    ids = (row.id for row in lines_of(file, ShareGptRow))
    gold = gold_answers(ids, raw.splits, raw.mended, read_gold) if read_gold else {}
    digests = dict(map(name_and_digest, entries.values()))
    groups = (group_of(row, digests, form.one_prompt) for row in lines_of(file, ShareGptRow))
    half = half_of(groups, part) if part else None
    rows, out = choose_rows(
        lines_of(file, ShareGptRow),
        digests,
        gold,
        feedback=has,
        last_answer_only=last_answer_only,
        count=count,
        key=key,
        seed=seed,
        half=half,
        one_prompt=form.one_prompt,
    )
    refuse_none(rows, file, out)
    return ChosenSplit(
        rows=rows,
        out=out,
        dataset=account.dataset,
        kind=account.kind,
        rows_digest=account.digests[file.name],
        pictures=store,
        feedback=has,
        last_answer_only=last_answer_only,
        gold=gold,
    )


def refuse_none(left: Sequence[Any], file: Path, out: Sequence[LeftOut]) -> None:
    """Refuse a split of which no row is left.

    Raises VlmflowError with the reasons.
    """
    if not left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts_of(out).items()) or "it has none"
        raise VlmflowError(
            f"{file}: no row can be evaluated: {reasons}",
            "docs/evaluation.md says which rows can be: take more rows (datasets.NAME.val_share, test, test_share), or "
            "set runs.NAME.evaluate.feedback: false if the human's later turns are not feedback",
        )
