"""Reads a split of a data set, and chooses its rows to evaluate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmflow.config.raw_forms import form_of, has_feedback
from vlmflow.core.account import read_account, refuse_other_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.evaluate import ChosenRow, choose_rows, counts_of
from vlmflow.evaluation.report import LeftOut
from vlmflow.pictures.manifest import name_and_digest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.rows.holdout import Part, group_of, half_of
from vlmflow.rows.mixture_files import member_of, own_id
from vlmflow.rows.sharegpt import ShareGptRow, lines_of, loss_scale
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.rows.trajectories import gold_answers


@dataclass(frozen=True)
class RawRows:
    """Raw files by split, and those of edited rows; none of both where raw rows have no gold answer."""

    splits: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    fixed_rows: Sequence[Path] = ()


@dataclass(frozen=True)
class ChosenSplit:
    """The rows of a split that are evaluated. out: the others, with the reason.

    dataset, kind: its name, and the kind of its raw rows, or `stats.MIXTURE`. rows_digest: SHA-256 of the split's file.
    pictures: the store of its pictures. feedback: whether the human's later turns are feedback. last_answer_only:
    whether only a row's last answer is trained. gold: the gold answers that raw rows have beside their turns, by the
    ids of rows.
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
        return loss_scale(self.feedback or self.last_answer_only)


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
    if rows have no pictures. raw: where gold answers are. feedback: the run's evaluate.feedback; None: whether the kind
    has it, and of a mixture only the rows of such kinds. count, key, seed: of
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
    has = any(map(has_feedback, account.kinds)) if feedback is None else feedback
    last_answer_only = account.last_answer_only
    gold = _gold_answers(file, account, raw)
    digests = dict(map(name_and_digest, entries.values()))
    groups = (group_of(row, digests, account.one_prompt) for row in lines_of(file, ShareGptRow))
    half = half_of(groups, part) if part else None
    without = {name for name, one in account.members.items() if has and not has_feedback(one.kind)}
    asked, unasked = _with_feedback(lines_of(file, ShareGptRow), without if feedback is None else set())
    rows, out = choose_rows(
        asked,
        digests,
        gold,
        feedback=has,
        last_answer_only=last_answer_only or any(one.form == "timestep" for one in account.members.values()),
        count=count,
        key=key,
        seed=seed,
        half=half,
        one_prompt=account.one_prompt,
    )
    out = unasked + out
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


def _gold_answers(file: Path, account: Stats, raw: RawRows) -> dict[str, str]:
    """Return the right answers that raw rows have beside their turns, by the ids of a split's rows.

    account: of the data set. In a mixture, each data set has its own raw files (raw/DATASET) and edited rows.
    """
    ids = [row.id for row in lines_of(file, ShareGptRow)]
    if not account.members:
        read_gold = form_of(account.kind).gold
        return gold_answers(ids, raw.splits, raw.fixed_rows, read_gold) if read_gold else {}
    found: dict[str, str] = {}
    for name, member in account.members.items():
        if read_gold := form_of(member.kind).gold:
            splits = {split: [one for one in files if one.parent.name == name] for split, files in raw.splits.items()}
            edited = {one.file for one in member.mended}
            own_fixed = [one for one in raw.fixed_rows if str(one) in edited]
            own = {own_id(identity): identity for identity in ids if member_of(identity) == name}
            gold = gold_answers(own, splits, own_fixed, read_gold)
            found |= {own[identity]: answer for identity, answer in gold.items()}
    return found


def _with_feedback(rows: Iterable[ShareGptRow], without: set[str]) -> tuple[list[ShareGptRow], list[LeftOut]]:
    """Return the rows but those of some data sets of a mixture. without: these, whose later turns are no feedback."""
    asked: list[ShareGptRow] = []
    out: list[LeftOut] = []
    for row in rows:
        if (member := member_of(row.id)) in without:
            out.append(LeftOut(row.id, "no_feedback", f"rows of data set {member} have none"))
        else:
            asked.append(row)
    return asked, out


def refuse_none(left: Sequence[Any], file: Path, out: Sequence[LeftOut]) -> None:
    """Refuse a split of which no row is left.

    Raises VlmflowError with the reasons.
    """
    if not left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts_of(out).items()) or "it has none"
        raise VlmflowError(
            f"{file}: no row can be evaluated: {reasons}",
            "docs/evaluation.md says which rows can be: take more rows (val_share, test, test_share of datasets.NAME "
            "or what it mixes), or set runs.NAME.evaluate.feedback: false if the human's later turns are not feedback",
        )
