"""Asks both models about chosen rows, scores their answers, and reports how often they are right."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from vlmflow.evaluation.answering.accounts import AfterRounds, AnsweredRow, AnsweredTurn, AskedModel, ModelAnswer
from vlmflow.evaluation.answering.asking import KeptAnswer, answers_to
from vlmflow.evaluation.answering.dialogues import Question, questions_of
from vlmflow.evaluation.answering.figures import figures_after_rounds, figures_by
from vlmflow.evaluation.answering.models import Model
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.scoring.answer_text import answer_in
from vlmflow.evaluation.scoring.judge import holds, judge, rule_of
from vlmflow.evaluation.scoring.overlap import overlap
from vlmflow.evaluation.scoring.results import Overlap
from vlmflow.rows.chat import without_tags
from vlmflow.rows.mixture_names import sources_of

log = logging.getLogger("vlmflow")

Answers = Mapping[str, KeptAnswer]
"""A model's answers by the questions' keys."""


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
    of_base, of_tuned = (_asked(every, model, how) for model in (base, tuned))
    rows = [
        _answered_row(case, some, of_base, of_tuned, how.feedback) for case, some in zip(cases, questions, strict=True)
    ]
    return (
        rows,
        AskedModel(base.digest, _overlap_of(every, of_base)),
        AskedModel(tuned.digest, _overlap_of(every, of_tuned)),
    )


def _asked(questions: Sequence[Question], model: Model, how: Asking) -> Answers:
    found, new = answers_to(questions, model, how.pictures, how.max_tokens, how.store)
    log.info(f"answers of {model.name}: {new} of {len(found)} were asked for now, the others before")
    return found


def _answered_row(
    case: Case, questions: Sequence[Question], base: Answers, tuned: Answers, feedback: bool
) -> AnsweredRow:
    """Return a row with both models' answers, scored. feedback: whether its later human turns are feedback."""
    shown = [question.turns[-1].value for question in questions[1:]]
    return AnsweredRow(
        id=case.row.id,
        source=case.row.source,
        images=case.row.images,
        group=case.group,
        holds_gold=any(holds(text, questions[0].gold) for text in shown) if feedback and shown else None,
        turns=[
            AnsweredTurn(
                rounds=question.rounds,
                prompt=without_tags(question.turns[-1].value).strip(),
                reference=question.reference,
                gold=question.gold,
                rule=rule_of(question.gold),
                base=_scored(base[question.key], question.gold),
                tuned=_scored(tuned[question.key], question.gold),
            )
            for question in questions
        ],
    )


def _overlap_of(questions: Sequence[Question], answers: Answers) -> Overlap:
    """Return FIRE's measures of a model's answers in the rows' own dialogues, over all turns."""
    return overlap([answers[question.key].text for question in questions], [each.reference for each in questions])


def _scored(kept: KeptAnswer, gold: str) -> ModelAnswer:
    answer = answer_in(kept.text)
    return ModelAnswer(kept.text, answer, kept.cut, **msgspec.structs.asdict(judge(answer, gold)))


def figures(rows: Sequence[AnsweredRow], how: Asking) -> Mapping[str, Any]:
    """Return the fields of `AnswerReport` that are figures of the rows."""

    def of(some: Sequence[AnsweredRow]) -> list[AfterRounds] | None:
        return figures_after_rounds(some, how.feedback) if some else None

    leaks = [row.holds_gold for row in rows if row.holds_gold is not None]
    return {
        "rows": len(rows),
        "groups": len({row.group for row in rows}),
        "gold_from_raw": sum(row.id in how.gold for row in rows) if how.feedback else 0,
        "holds_gold": fmean(leaks) if leaks else None,
        "all": figures_after_rounds(rows, how.feedback),
        "without_gold": of([row for row in rows if row.holds_gold is False]),
        "with_gold": of([row for row in rows if row.holds_gold]),
        "sources": figures_by(rows, lambda row: sources_of(row.id, row.source), how.feedback),
        "rules": figures_by(rows, lambda row: [row.turns[-1].rule], how.feedback),
    }


def sentence_of(after: Sequence[AfterRounds], feedback: bool) -> str:
    """Return the shares of right answers, for people. feedback: whether later turns of the human are feedback."""
    return "; ".join(
        f"{_rounds(each.rounds, feedback)} {each.base.right.mean:.1%} of the base's and {each.tuned.right.mean:.1%} of "
        f"the tuned model's answers are right ({each.rows} rows)"
        for each in after
    )


def _rounds(count: int, feedback: bool) -> str:
    what = "round" if feedback else "earlier question"
    return "at first" if not count else f"after {count} {what}{'s' if count > 1 else ''}"
