"""Compares a tuned model with its base on rows that neither was trained on."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.choice import (
    Case,
    draw,
    last_attempts,
    of_groups,
    parted,
    read_case,
    with_right_last,
    without_single_turns,
)
from vlmflow.evaluation.donors import feedback_donors, picture_donors, without_donor
from vlmflow.evaluation.measure import RIGHT, WRONG, margins_of, passes_of, scored_answers
from vlmflow.evaluation.report import EvaluatedRow, LeftOut
from vlmflow.evaluation.scoring.judge import holds
from vlmflow.evaluation.scoring.stated import answer_in
from vlmflow.rows.sharegpt import ShareGptRow


@dataclass(frozen=True)
class ChosenRow:
    """A row to evaluate.

    donor, picture_donor: the rows that give the controls; None in a data set without feedback, or if there is no such
    picture. gold_in_feedback: whether its feedback contains the gold answer.
    """

    case: Case
    donor: Case | None
    picture_donor: Case | None
    gold_in_feedback: bool
    work: Work


Scorer = Callable[[Sequence[Work]], Mapping[str, Measured]]
"""Measures rows with one model: returns the losses by the works' keys."""


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
) -> tuple[list[ChosenRow], list[LeftOut]]:
    """Choose the rows of a split; returns them in its order, and all others with the reason.

    pictures: the SHA-256 of every picture, by its name in the store. gold: the gold answers that raw rows have beside
    their turns, by the ids of rows. feedback: whether the human's later turns are feedback. last_answer_only: whether a
    trajectory is one row per attempt. count: how many rows are wanted. key: the one of the configuration that says so.
    seed: of the draw and of the donors. half: the groups of which rows are wanted; the others only give controls.
    one_prompt: all questions are the same (`halves.group_of`).
    """
    cases = [read_case(row, pictures, one_prompt) for row in rows]
    cases, out = without_single_turns(cases)
    if last_answer_only:
        cases, earlier = last_attempts(cases)
        out += earlier
    donors: dict[str, Case] = {}
    if feedback:
        cases, others = parted(
            cases, lambda case: bool(case.feedback), "no_feedback", "it has one answer, or calls functions"
        )
        out += others
        made = [with_right_last(case) for case in cases]
        out += [each for each in made if isinstance(each, LeftOut)]
        cases = [each for each in made if isinstance(each, Case)]
        donors = feedback_donors(cases, gold, seed)
        out += [without_donor(case) for case in cases if case.row.id not in donors]
        cases = [case for case in cases if case.row.id in donors]
    other_pictures = picture_donors(cases, gold, seed)
    if half is not None:
        cases, others = of_groups(cases, half)
        out += others
    cases, others = draw(cases, count, seed, key)
    chosen = [_chosen(case, donors.get(case.row.id), other_pictures.get(case.row.id), gold) for case in cases]
    return chosen, out + others


def evaluated_rows(
    chosen: Sequence[ChosenRow], base: Scorer, tuned: Scorer
) -> tuple[list[EvaluatedRow], list[LeftOut]]:
    """Measure rows with both models; returns the results, and the rows that are too long for the run.

    Raises VlmflowError if both models did not get the same tokens, or the scored answer of a row is not the same in all
    passes.
    """
    work = [row.work for row in chosen]
    of_base = base(work)
    of_tuned = tuned(work)
    found, too_long = [], []
    for row in chosen:
        identity = row.case.row.id
        ours, theirs = of_tuned[row.work.key], of_base[row.work.key]
        if ours.inputs != theirs.inputs:
            raise VlmflowError(
                f"row {identity}: the base and the tuned model get different tokens",
                "the tuned folder has another tokenizer, chat template or picture rule than its base: remove verified/ "
                "and merged/ of the run, and run the same command again",
            )
        if not ours.losses:
            too_long.append(LeftOut(identity, "over_long", f"{ours.tokens} tokens, more than train.max_length"))
            continue
        _refuse_other_answers(identity, ours)
        found.append(
            EvaluatedRow(
                id=identity,
                source=row.case.row.source,
                images=row.case.row.images,
                group=row.case.group,
                **_answers(row),
                donor=row.donor.row.id if row.donor else None,
                picture_donor=row.picture_donor.row.id if row.picture_donor else None,
                gold_in_feedback=row.gold_in_feedback,
                base=margins_of(theirs.losses),
                tuned=margins_of(ours.losses),
            )
        )
    return found, too_long


def write_lines(file: Path, lines: Sequence[msgspec.Struct]) -> None:
    """Write accounts as JSON lines."""
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def counts_of(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """Return how many rows are out, by reason."""
    return dict(sorted(Counter(row.reason for row in left_out).items()))


def _chosen(case: Case, donor: Case | None, picture_donor: Case | None, gold: Mapping[str, str]) -> ChosenRow:
    passes = passes_of(case, donor, picture_donor)
    content = msgspec.json.encode([passes, case.pictures, picture_donor.pictures if picture_donor else None])
    answer = gold.get(case.row.id) or answer_in(case.answer)
    return ChosenRow(
        case,
        donor,
        picture_donor,
        any(holds(each, answer) for each in case.feedback),
        Work(hashlib.sha256(content).hexdigest()[:32], passes),
    )


def _answers(row: ChosenRow) -> dict[str, str | None]:
    """Return the texts that are scored; none in a data set without feedback, where all answers are."""
    answers = scored_answers(row.case) if row.donor else {}
    return {which: answers[which].value if which in answers else None for which in (RIGHT, WRONG)}


def _refuse_other_answers(identity: str, measured: Measured) -> None:
    """Refuse a row of which an answer has other tokens in another context: the losses would not compare."""
    for which in (RIGHT, WRONG):
        tokens = {name: each.tokens for name, each in measured.losses.items() if name.endswith(which)}
        if len({(measured.answers[name], count) for name, count in tokens.items()}) > 1:
            raise VlmflowError(
                f"row {identity}: its answer has different tokens in different contexts (their numbers: {tokens})",
                "this is a bug; please report it with the row",
            )
