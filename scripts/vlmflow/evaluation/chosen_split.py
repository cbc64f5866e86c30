"""Reads a split of a data set, and chooses its rows to evaluate, each with its controls."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmflow.config.raw_forms import form_of, has_feedback
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.account import read_account, refuse_other_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.choice import (
    Case,
    draw,
    echoes,
    feedback_donors,
    last_attempts,
    neutral_feedback,
    of_groups,
    parted,
    picture_donors,
    read_case,
    with_right_last,
    without_donor,
    without_single_turns,
)
from vlmflow.evaluation.measure import ChosenRow, Measurement, row_to_measure
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
class SplitFiles:
    """The files of a split. rows: data/DATASET/SPLIT.jsonl. stats: the data set's account.

    picture_store: the folder of all picture stores. manifests: the image manifests; none if rows have no pictures.
    raw, fixed_rows: raw files by split, and those of edited rows; none of both where raw rows have no gold answer.
    """

    rows: Path
    stats: Path
    picture_store: Path
    manifests: Sequence[Path] = ()
    raw: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    fixed_rows: Sequence[Path] = ()


@dataclass(frozen=True)
class ChosenSplit:
    """The rows of a split that are evaluated. out: the others, with the reason.

    dataset: its name. rows_digest: SHA-256 of the split's file. pictures: the store of its pictures. feedback: whether
    the human's later turns are feedback. last_answer_only: whether only a row's last answer is trained. gold: the gold
    answers that raw rows have beside their turns, by the ids of rows.
    """

    rows: list[ChosenRow]
    out: list[LeftOut]
    dataset: str
    rows_digest: str
    pictures: Path
    feedback: bool
    last_answer_only: bool
    gold: Mapping[str, str]

    def measurement(
        self, settings: TrainSettings, model_type: str, device: str, processes: int, threads: int
    ) -> Measurement:
        """Return how models are measured on these rows. settings: of a run, or of its training."""
        tokens, length = settings.image_max_tokens, settings.max_length
        text, dtype, scale = settings.text_args, settings.dtype, self.loss_scale
        return Measurement(model_type, text, scale, self.pictures, tokens, length, device, dtype, processes, threads)

    @property
    def loss_scale(self) -> str:
        """The value of ms-swift's `loss_scale` that scores what is compared: the last answer, or all of them."""
        return loss_scale(self.feedback or self.last_answer_only)


def choose_from_split(
    files: SplitFiles,
    *,
    feedback: bool | None,
    count: int,
    key: str,
    seed: int,
    part: Part | None,
    neutral: Sequence[str] = (),
) -> ChosenSplit:
    """Choose rows of a split.

    feedback: the run's evaluate.feedback; None: whether the kind has it, and of a mixture only the rows of such kinds.
    count, key, seed: of the draw (`choose_rows`). part: which half of val is wanted (`halves`); None for all rows.
    neutral: the run's evaluate.neutral_feedback; () if no row is measured with it.

    Raises VlmflowError if rows, raw rows or pictures have changed, or no row can be evaluated.
    """
    file, account = files.rows, read_account(files.stats, Stats)
    refuse_other_rows(files.stats, [file])
    store = files.picture_store / account.dataset
    named = pictures_in(file)
    entries = entries_named(named, files.manifests)
    if unknown := sorted(named - entries.keys()):
        raise VlmflowError(
            f"{file}: {len(unknown)} pictures are in no image manifest "
            f"({', '.join(map(str, files.manifests)) or 'none'}): {', '.join(unknown[:3])}",
            f"check them again: make refresh-pictures DATASET={account.dataset}",
        )
    refuse_changed_pictures(store, entries.values())
    has = any(map(has_feedback, account.kinds)) if feedback is None else feedback
    gold = _gold_answers(files, account)
    digests = dict(map(name_and_digest, entries.values()))
    groups = (group_of(row, digests, account.one_prompt) for row in lines_of(file, ShareGptRow))
    half = half_of(groups, part) if part else None
    members = account.members.items()
    without = {name for name, member in members if feedback is None and has and not has_feedback(member.kind)}
    # The later turns of rows of these data sets are no feedback.
    out = [
        LeftOut(row.id, "no_feedback", f"rows of data set {member_of(row.id)} have none")
        for row in lines_of(file, ShareGptRow)
        if member_of(row.id) in without
    ]
    chosen, others = choose_rows(
        *([row for row in lines_of(file, ShareGptRow) if member_of(row.id) not in without], digests, gold),
        feedback=has,
        last_answer_only=account.last_answer_only or any(member.form == "timestep" for _, member in members),
        count=count,
        key=key,
        seed=seed,
        half=half,
        one_prompt=account.one_prompt,
        neutral=neutral,
    )
    refuse_none(chosen, file, out + others)
    return ChosenSplit(
        rows=chosen,
        out=out + others,
        dataset=account.dataset,
        rows_digest=account.digests[file.name],
        pictures=store,
        feedback=has,
        last_answer_only=account.last_answer_only,
        gold=gold,
    )


def _gold_answers(files: SplitFiles, account: Stats) -> dict[str, str]:
    """Return the right answers that raw rows have beside their turns, by the ids of a split's rows.

    account: of the data set. In a mixture, each data set has its own raw files (raw/DATASET) and edited rows.
    """
    ids = [row.id for row in lines_of(files.rows, ShareGptRow)]
    if not account.members:
        read_gold = form_of(account.kind).gold
        return gold_answers(ids, files.raw, files.fixed_rows, read_gold) if read_gold else {}
    gold: dict[str, str] = {}
    for name, member in account.members.items():
        if read_gold := form_of(member.kind).gold:
            splits = {split: [path for path in raw if path.parent.name == name] for split, raw in files.raw.items()}
            edited = {fixed.file for fixed in member.mended}
            fixed_rows = [path for path in files.fixed_rows if str(path) in edited]
            own = {own_id(identity): identity for identity in ids if member_of(identity) == name}
            answers = gold_answers(own, splits, fixed_rows, read_gold)
            gold |= {own[identity]: answer for identity, answer in answers.items()}
    return gold


def choose_rows(
    rows: Iterable[ShareGptRow],
    pictures: Mapping[str, str],
    gold: Mapping[str, str],
    *,
    feedback: bool,
    last_answer_only: bool,
    count: int,
    key: str,
    seed: int,
    half: frozenset[str] | None = None,
    one_prompt: bool = False,
    neutral: Sequence[str] = (),
) -> tuple[list[ChosenRow], list[LeftOut]]:
    """Choose the rows of a split; returns them in its order, and all others with the reason.

    pictures: the SHA-256 of every picture, by its name in the store. gold: the gold answers that raw rows have beside
    their turns, by the ids of rows. feedback: whether the human's later turns are feedback. last_answer_only: whether a
    trajectory is one row per attempt. count: how many rows are wanted. key: the one of the configuration that says so.
    seed: of the draw and of the donors. half: the groups of which rows are wanted; the others only give controls.
    one_prompt: all questions are the same (`halves.group_of`). neutral: texts of neutral feedback; () for none.
    """
    cases = [read_case(row, pictures, one_prompt) for row in rows]
    cases, out = without_single_turns(cases)
    if last_answer_only:
        cases, others = last_attempts(cases)
        out += others
    donors: dict[str, list[Case]] = {}
    echo: dict[str, list[str]] = {}
    if feedback:
        why = "it has one answer, or calls functions"
        cases, others = parted(cases, lambda case: bool(case.feedback), "no_feedback", why)
        out += others
        made = [with_right_last(case) for case in cases]
        out += [left for left in made if isinstance(left, LeftOut)]
        cases = [case for case in made if isinstance(case, Case)]
        echo = echoes(cases)
        donors = feedback_donors(cases, gold, seed)
        out += [without_donor(case) for case in cases if case.row.id not in donors]
        cases = [case for case in cases if case.row.id in donors]
    other_pictures = picture_donors(cases, gold, seed)
    if half is not None:
        cases, others = of_groups(cases, half)
        out += others
    cases, others = draw(cases, count, seed, key)
    chosen = [
        row_to_measure(
            case,
            donors.get(case.row.id, []),
            other_pictures.get(case.row.id),
            neutral=neutral_feedback(case, neutral) if feedback and neutral else (),
            gold=gold.get(case.row.id),
            echo=echo.get(case.row.id, []),
        )
        for case in cases
    ]
    return chosen, out + others


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


def counts_of(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """Return how many rows are out, by reason."""
    return dict(sorted(Counter(row.reason for row in left_out).items()))
