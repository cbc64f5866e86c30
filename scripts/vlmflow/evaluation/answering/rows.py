"""Joins questions and answers of both models to the rows of `rows.jsonl`, and scores them."""

from collections.abc import Mapping, Sequence

import msgspec

from vlmflow.evaluation.answering.accounts import AnsweredRow, AnsweredTurn, ModelAnswer
from vlmflow.evaluation.answering.asking import KeptAnswer
from vlmflow.evaluation.answering.dialogues import Question
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.scoring.answer_text import answer_in
from vlmflow.evaluation.scoring.judge import holds, judge, rule_of
from vlmflow.evaluation.scoring.overlap import overlap
from vlmflow.evaluation.scoring.results import Overlap
from vlmflow.rows.chat import without_tags

Answers = Mapping[str, KeptAnswer]
"""A model's answers by the questions' keys."""


def answered_row(
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


def overlap_of(questions: Sequence[Question], answers: Answers) -> Overlap:
    """Return FIRE's measures of a model's answers in the rows' own dialogues, over all turns."""
    return overlap([answers[question.key].text for question in questions], [each.reference for each in questions])


def _scored(kept: KeptAnswer, gold: str) -> ModelAnswer:
    answer = answer_in(kept.text)
    return ModelAnswer(kept.text, answer, kept.cut, **msgspec.structs.asdict(judge(answer, gold)))
