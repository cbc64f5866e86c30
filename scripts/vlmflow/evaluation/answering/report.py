"""Asks both models about chosen rows, and reports how often they are right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmflow.evaluation.answering.accounts import AfterRounds, AnsweredRow, AskedModel
from vlmflow.evaluation.answering.asking import answers_to
from vlmflow.evaluation.answering.dialogues import questions_of
from vlmflow.evaluation.answering.figures import figures_after_rounds, figures_by
from vlmflow.evaluation.answering.models import Model
from vlmflow.evaluation.answering.rows import answered_row, overlap_of
from vlmflow.evaluation.choice import Case


@dataclass(frozen=True)
class Asking:
    """How models are asked. rounds, max_tokens: see `AnswerSettings`. feedback: whether the rows have it.

    gold: right answers by the rows' ids, where raw rows have them. pictures: the store of the rows' pictures.
    store: `stores.evaluations`. seed: of the intervals.
    """

    rounds: int
    max_tokens: int
    feedback: bool
    gold: Mapping[str, str]
    pictures: Path
    store: Path
    seed: int


def ask_both(
    cases: Sequence[Case], base: Model, tuned: Model, how: Asking
) -> tuple[list[AnsweredRow], AskedModel, AskedModel]:
    """Ask both models all questions of some rows, at least one; returns the scored rows and what is said of the models.

    Raises VlmflowError with the row if an answer fails.
    """
    questions = [questions_of(case, how.rounds, how.feedback, how.gold.get(case.row.id)) for case in cases]
    every = list(chain.from_iterable(questions))
    of_base, new_of_base = answers_to(every, base, how.pictures, how.max_tokens, how.store)
    of_tuned, new_of_tuned = answers_to(every, tuned, how.pictures, how.max_tokens, how.store)
    rows = [
        answered_row(case, some, of_base, of_tuned, how.feedback) for case, some in zip(cases, questions, strict=True)
    ]
    return (
        rows,
        AskedModel(base.digest, new_of_base, overlap_of(every, of_base)),
        AskedModel(tuned.digest, new_of_tuned, overlap_of(every, of_tuned)),
    )


def figures(rows: Sequence[AnsweredRow], how: Asking) -> Mapping[str, Any]:
    """Return the fields of `AnswerReport` that are figures of the rows."""

    def of(some: Sequence[AnsweredRow]) -> list[AfterRounds] | None:
        return figures_after_rounds(some, how.seed, how.feedback) if some else None

    return {
        "rows": len(rows),
        "groups": len({row.group for row in rows}),
        "gold_from_raw": sum(row.id in how.gold for row in rows) if how.feedback else 0,
        "holds_gold": fmean(bool(row.holds_gold) for row in rows) if how.feedback else None,
        "all": figures_after_rounds(rows, how.seed, how.feedback),
        "without_gold": of([row for row in rows if row.holds_gold is False]),
        "with_gold": of([row for row in rows if row.holds_gold]),
        "sources": figures_by(rows, lambda row: row.source, how.seed, how.feedback),
        "rules": figures_by(rows, lambda row: row.turns[-1].rule, how.seed, how.feedback),
    }


def sentence_of(after: Sequence[AfterRounds]) -> str:
    """Return the shares of right answers, for people."""
    return "; ".join(
        f"{_rounds(each.rounds)} {each.base.right.mean:.1%} of the base's and {each.tuned.right.mean:.1%} of the tuned "
        f"model's answers are right ({each.rows} rows)"
        for each in after
    )


def _rounds(count: int) -> str:
    return "at first" if not count else f"after {count} round{'s' if count > 1 else ''}"
