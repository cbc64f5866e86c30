"""Reads a split of a data set, and chooses its rows to evaluate, each with its controls."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

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
from vlmflow.evaluation.report import CHOICE, Choice, LeftOut
from vlmflow.lengths.summary import fitted_rows
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

    @cached_property
    def account(self) -> Stats:
        """The data set's account; raises VlmflowError if it is of other rows."""
        refuse_other_rows(self.stats, [self.rows])
        return read_account(self.stats, Stats)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each picture by its name in the store.

        Raises VlmflowError if a picture has changed, or is in no manifest.
        """
        named = pictures_in(self.rows)
        entries = entries_named(named, self.manifests)
        if unknown := sorted(named - entries.keys()):
            raise VlmflowError(
                f"{self.rows}: {len(unknown)} pictures are in no image manifest "
                f"({', '.join(map(str, self.manifests)) or 'none'}): {', '.join(unknown[:3])}",
                f"check them again: vlmflow refresh-pictures FILE {self.account.dataset}",
            )
        refuse_changed_pictures(self.picture_store / self.account.dataset, entries.values())
        return dict(map(name_and_digest, entries.values()))

    @property
    def groups(self) -> Iterator[str]:
        """The group of each row (`holdout.group_of`)."""
        return (group_of(row, self.digests, self.account.one_prompt) for row in lines_of(self.rows, ShareGptRow))


class Candidate(msgspec.Struct, frozen=True):
    """A line of `chosen/RUN/SPLIT/rows.jsonl`: a row that can be evaluated, with its controls.

    donors, picture_donor: the ids of the rows that give them. echo: see `choice.echoes`. gold: the gold answer that the
    raw row has beside its turns.
    """

    id: str
    donors: list[str]
    picture_donor: str | None
    echo: list[str]
    gold: str | None


@dataclass(frozen=True)
class Candidates:
    """The rows of a split that can be evaluated. cases: by id, in the order of the split. lines: the same.

    out: the others, with the reason. feedback: whether the human's later turns are feedback.
    """

    cases: dict[str, Case]
    lines: list[Candidate]
    out: list[LeftOut]
    feedback: bool

    def drawn(
        self, *, count: int, key: str, seed: int, half: frozenset[str] | None = None, neutral: Sequence[str] = ()
    ) -> tuple[list[ChosenRow], list[LeftOut]]:
        """Draw rows; returns them in the order of the split, and all others with the reason.

        count: how many rows are wanted. key: the one of the configuration that says so. seed: of the draw. half: the
        groups of which rows are wanted; the others only give controls. neutral: texts of neutral feedback; () for none.
        """
        cases, out = list(self.cases.values()), list(self.out)
        if half is not None:
            cases, others = of_groups(cases, half)
            out += others
        cases, others = draw(cases, count, seed, key)
        drawn = {case.row.id for case in cases}
        return [self._to_measure(line, neutral) for line in self.lines if line.id in drawn], out + others

    def _to_measure(self, line: Candidate, neutral: Sequence[str]) -> ChosenRow:
        case = self.cases[line.id]
        return row_to_measure(
            case,
            [self.cases[donor] for donor in line.donors],
            self.cases[line.picture_donor] if line.picture_donor else None,
            neutral=neutral_feedback(case, neutral) if self.feedback and neutral else (),
            gold=line.gold,
            echo=line.echo,
        )


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
) -> ChosenSplit:
    """Choose rows of a split, to compare trials of a search.

    feedback, seed: of `candidates_of`. count, key: of the draw. part: which half of val is wanted (`rows.holdout`);
    None for all rows.

    Raises VlmflowError if rows, raw rows or pictures have changed, or no row can be evaluated.
    """
    candidates = candidates_of(files, feedback=feedback, seed=seed)
    return draw_split(files, candidates, count=count, key=key, seed=seed, part=part)


def draw_split(
    files: SplitFiles,
    candidates: Candidates,
    *,
    count: int,
    key: str,
    seed: int,
    part: Part | None,
    neutral: Sequence[str] = (),
) -> ChosenSplit:
    """Draw rows of a split.

    count, key, seed, neutral: of `Candidates.drawn`. part: which half of val
    is wanted (`rows.holdout`); None for all rows.

    Raises VlmflowError if no row can be evaluated.
    """
    half, account = half_of(files.groups, part) if part else None, files.account
    rows, out = candidates.drawn(count=count, key=key, seed=seed, half=half, neutral=neutral)
    refuse_none(rows, files.rows, out)
    return ChosenSplit(
        rows=rows,
        out=out,
        dataset=account.dataset,
        rows_digest=account.digests[files.rows.name],
        pictures=files.picture_store / account.dataset,
        feedback=candidates.feedback,
        last_answer_only=account.last_answer_only,
        gold={line.id: line.gold for line in candidates.lines if line.gold is not None},
    )


def candidates_of(
    files: SplitFiles, *, feedback: bool | None, seed: int, trained: Set[str] = frozenset()
) -> Candidates:
    """Return the rows of a split that can be evaluated, with their controls.

    feedback: the run's evaluate.feedback; None: whether the kind has it, and
    of a mixture only the rows of such kinds. seed: of the donors. trained: what the run's bases were trained on
    (`trained_on`).

    Raises VlmflowError if rows, raw rows or pictures have changed.
    """
    account = files.account
    has = any(map(has_feedback, account.kinds)) if feedback is None else feedback
    members = account.members.items()
    without = {name for name, member in members if feedback is None and has and not has_feedback(member.kind)}
    rows, out = [], []
    for row in lines_of(files.rows, ShareGptRow):
        if member_of(row.id) in without:  # the later turns of these rows are no feedback
            out.append(LeftOut(row.id, "no_feedback", f"rows of data set {member_of(row.id)} have none"))
        elif trained and not trained.isdisjoint(_seen(row, files.digests)):
            out.append(LeftOut(row.id, "trained_before", "a base of the run was trained on its picture or question"))
        else:
            rows.append(row)
    candidates = choose_candidates(
        *(rows, files.digests, _gold_answers(files)),
        feedback=has,
        last_answer_only=account.last_answer_only or any(member.form == "timestep" for _, member in members),
        seed=seed,
        one_prompt=account.one_prompt,
    )
    return replace(candidates, out=out + candidates.out)


def trained_on(rows: Path, manifests: Sequence[Path]) -> set[str]:
    """Return what a run was trained on: the SHA-256 of its pictures, and the groups of its questions without a picture.

    rows: fitted/RUN. manifests: image manifests, images/DATASET/SPLIT.jsonl; those of its data set count, as another's
    pictures may have the same names.
    """
    own = [file for file in manifests if file.parent.name == fitted_rows(rows).dataset]
    digests = dict(map(name_and_digest, entries_named(pictures_in(rows / "train.jsonl"), own).values()))
    return {seen for row in lines_of(rows / "train.jsonl", ShareGptRow) for seen in _seen(row, digests)}


def _seen(row: ShareGptRow, digests: Mapping[str, str]) -> set[str]:
    return {digests[name] for name in row.images} or {group_of(row, digests)}


def read_candidates(folder: Path, files: SplitFiles) -> Candidates:
    """Read what `choose_rows` chose. folder: chosen/RUN/SPLIT.

    Raises VlmflowError if it chose from other rows, or rows or pictures have changed.
    """
    choice = read_account(folder / CHOICE, Choice)
    if choice.rows_digest != files.account.digests[files.rows.name]:
        raise VlmflowError(
            f"{folder}: its rows were chosen from another {files.rows}",
            f"remove {folder} and run the same command again",
        )
    lines = list(lines_of(folder / "rows.jsonl", Candidate))
    names = {line.id for line in lines}
    cases = {
        row.id: read_case(row, files.digests, files.account.one_prompt)
        for row in lines_of(files.rows, ShareGptRow)
        if row.id in names
    }
    if choice.feedback:
        cut = {name: with_right_last(case) for name, case in cases.items()}
        cases = {name: case for name, case in cut.items() if isinstance(case, Case)}
    return Candidates(cases, lines, list(lines_of(folder / "left_out.jsonl", LeftOut)), choice.feedback)


def _gold_answers(files: SplitFiles) -> dict[str, str]:
    """Return the right answers that raw rows have beside their turns, by the ids of a split's rows; none without files.

    In a mixture, each data set has its own raw files (raw/DATASET) and edited rows.
    """
    if not files.raw:
        return {}
    account = files.account
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


def choose_candidates(
    rows: Iterable[ShareGptRow],
    pictures: Mapping[str, str],
    gold: Mapping[str, str],
    *,
    feedback: bool,
    last_answer_only: bool,
    seed: int,
    one_prompt: bool = False,
) -> Candidates:
    """Return the rows that can be evaluated, with their controls, in the order of the split.

    pictures: the SHA-256 of every picture, by its name in the store. gold: the gold answers that raw rows have beside
    their turns, by the ids of rows. feedback: whether the human's later turns are feedback. last_answer_only: whether a
    trajectory is one row per attempt. seed: of the donors. one_prompt: all questions are the same (`holdout.group_of`).
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
    other_pictures = {name: case.row.id for name, case in picture_donors(cases, gold, seed).items()}
    lines = [
        Candidate(
            id=case.row.id,
            donors=[donor.row.id for donor in donors.get(case.row.id, [])],
            picture_donor=other_pictures.get(case.row.id),
            echo=echo.get(case.row.id, []),
            gold=gold.get(case.row.id),
        )
        for case in cases
    ]
    return Candidates({case.row.id: case for case in cases}, lines, out, feedback)


def choice_of(run: str, files: SplitFiles, candidates: Candidates, *, halved: bool) -> Choice:
    """Return on how many rows of a split a verdict can rest. run: its name. halved: whether a half of val judges."""
    groups = set(files.groups)
    half = half_of(groups, "judges") if halved else None
    cases = [case for case in candidates.cases.values() if half is None or case.group in half]
    echo = {line.id for line in candidates.lines if line.echo}
    return Choice(
        run=run,
        dataset=files.account.dataset,
        split=files.rows.stem,
        rows_digest=files.account.digests[files.rows.name],
        feedback=candidates.feedback,
        rows=len(cases),
        groups=len({case.group for case in cases}),
        groups_without_echo=len({case.group for case in cases if case.row.id not in echo}),
        all_groups=len(half or groups),
        left_out=counts_of(candidates.out),
    )


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
