"""Compares a tuned model with its base on rows that neither was trained on."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import SAME_ANSWER, EvaluatedRow, LeftOut
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.choice import Case, draw, last_attempts, read_case, without_single_turns
from vlmflow.evaluation.donors import find_donors, without_donor
from vlmflow.evaluation.passes import passes_with_feedback, passes_without_feedback
from vlmflow.rows.data_rows import Row


@dataclass(frozen=True)
class ChosenRow:
    """A row to evaluate. donor: the row that gives the placebo; None in a data set without feedback."""

    case: Case
    donor: Case | None
    work: Work


Scorer = Callable[[Sequence[Work]], Mapping[str, Measured]]
"""Measures rows with one model: returns the losses by the works' keys."""


def choose_rows(
    rows: Iterable[Row],
    pictures: Mapping[str, str],
    tokenizer: Tokenizer,
    gold: Mapping[str, str],
    *,
    feedback: bool,
    last_answer_only: bool,
    count: int,
    key: str,
    seed: int,
) -> tuple[list[ChosenRow], list[LeftOut]]:
    """Choose the rows of a split; returns them in its order, and all others with the reason.

    pictures: the SHA-256 of every picture, by its name in the store. tokenizer: the base's, for the length of feedback.
    gold: the gold answers that raw rows have beside their turns, by the ids of rows. feedback: whether the human's
    later turns are feedback. last_answer_only: whether a trajectory is one row per attempt. count: how many rows are
    wanted. key: the one of the configuration that says so. seed: of the draw and of the donors.
    """
    cases = [read_case(row, pictures) for row in rows]
    cases, out = without_single_turns(cases)
    if last_answer_only:
        cases, earlier = last_attempts(cases)
        out += earlier
    donors: dict[str, Case] = {}
    if feedback:
        out += [LeftOut(case.row.id, "no_feedback", "it has one answer") for case in cases if not case.feedback]
        cases = [case for case in cases if case.feedback]
        donors = find_donors(cases, _feedback_tokens(cases, tokenizer), gold, seed)
        out += [without_donor(case) for case in cases if case.row.id not in donors]
        cases = [case for case in cases if case.row.id in donors]
    cases, others = draw(cases, count, seed, key)
    return [_chosen(case, donors.get(case.row.id)) for case in cases], out + others


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
                donor=row.donor.row.id if row.donor else None,
                base=theirs.losses,
                tuned=ours.losses,
            )
        )
    return found, too_long


def write_lines(file: Path, lines: Sequence[msgspec.Struct]) -> None:
    """Write accounts as JSON lines."""
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def counts_of(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """Return how many rows are out, by reason."""
    return dict(sorted(Counter(row.reason for row in left_out).items()))


def _feedback_tokens(cases: Sequence[Case], tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens of all feedback in each row, by the row's id."""
    texts = ["\n".join(case.feedback) for case in cases]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return {case.row.id: len(each.ids) for case, each in zip(cases, encoded, strict=True)}


def _chosen(case: Case, donor: Case | None) -> ChosenRow:
    passes = passes_with_feedback(case, donor) if donor else passes_without_feedback(case)
    content = msgspec.json.encode([passes, case.pictures])
    return ChosenRow(case, donor, Work(hashlib.sha256(content).hexdigest()[:32], case.row.images, passes))


def _refuse_other_answers(identity: str, measured: Measured) -> None:
    """Refuse a row whose answer has other tokens after another history: the losses would not compare."""
    scored = [name for name in measured.losses if name in SAME_ANSWER]
    if len({(measured.answers[name], measured.losses[name].tokens) for name in scored}) > 1:
        tokens = {name: measured.losses[name].tokens for name in scored}
        raise VlmflowError(
            f"row {identity}: its answer has different tokens in different histories (their numbers: {tokens})",
            "this is a bug; please report it with the row",
        )
