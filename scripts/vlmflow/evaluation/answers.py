"""Leaves out rows that are longer than a run allows, as training counts their tokens.

From answers to figures: how many are right after k rounds of feedback, and what became of the first answers.

Asks both models about chosen rows, scores their answers, and reports how often they are right.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from vlmflow.core.errors import log
from vlmflow.evaluation.asking import KeptAnswer, Model, Question, answers_to, questions_of
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.chosen_split import ChosenSplit
from vlmflow.evaluation.margins import (
    Bounds,
    Groups,
    Values,
    difference_interval,
    intervals_of,
    mean_interval,
    share_interval,
)
from vlmflow.evaluation.report import (
    AfterRounds,
    AnsweredRow,
    AnsweredTurn,
    AskedModel,
    Change,
    Interval,
    LeftOut,
    ModelAnswer,
    ModelFigures,
)
from vlmflow.evaluation.scoring.judge import holds, judge, overlap, rule_of
from vlmflow.evaluation.scoring.stated import answer_in
from vlmflow.lengths.count import TokenCounter
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.rows.chat import without_tags
from vlmflow.rows.mixture_files import sources_of
from vlmflow.swift.chat_form import ChatForm


def fitting_cases(
    chosen: ChosenSplit,
    base: Path,
    manifests: Sequence[Path],
    image_max_tokens: int,
    text_args: Mapping[str, Any],
    max_length: int,
) -> tuple[list[Case], list[LeftOut]]:
    """Return the chosen rows of at most `max_length` tokens, and the others as left out.

    base: the base model's folder. manifests: the image manifests of the rows. The others are settings of the run.
    """
    pictures = chain.from_iterable(map(read_picture_manifest, manifests))
    form = ChatForm.of(text_args, chosen.last_answer_only)
    counter = TokenCounter(base, pictures, image_max_tokens, form)
    cases = [each.case for each in chosen.rows]
    counts = [sum(each) for each in counter.count([case.row for case in cases])]
    fit, out = [], []
    for case, tokens in zip(cases, counts, strict=True):
        if tokens <= max_length:
            fit.append(case)
        else:
            out.append(LeftOut(case.row.id, "over_long", f"{tokens} tokens, more than train.max_length"))
    return fit, out


Pick = Callable[[AnsweredTurn], ModelAnswer]
"""Takes the answer of one of the models."""

BASE: Pick = attrgetter("base")
TUNED: Pick = attrgetter("tuned")

Kind = Callable[[Values, Groups], Bounds]
"""Computes an interval (`intervals`)."""


def figures_after_rounds(rows: Sequence[AnsweredRow], feedback: bool) -> list[AfterRounds]:
    """Return the figures of both models after 0, 1, … rounds, each over the rows that have so many.

    feedback: whether there are transitions.
    """
    most = max(len(row.turns) for row in rows)
    return [_after(rounds, [row for row in rows if len(row.turns) > rounds], feedback) for rounds in range(most)]


def figures_by(
    rows: Sequence[AnsweredRow], kinds_of: Callable[[AnsweredRow], Iterable[Hashable]], feedback: bool
) -> dict[str, list[AfterRounds]]:
    """Return the figures of every kind of rows, sorted by its name. kinds_of: gives those to which a row belongs."""
    kinds: dict[str, list[AnsweredRow]] = defaultdict(list)
    for row in rows:
        for kind in kinds_of(row):
            kinds[str(kind)].append(row)
    return {name: figures_after_rounds(some, feedback) for name, some in sorted(kinds.items())}


def _after(rounds: int, rows: Sequence[AnsweredRow], feedback: bool) -> AfterRounds:
    groups = [row.group for row in rows]
    base, tuned = ([pick(row.turns[rounds]) for row in rows] for pick in (BASE, TUNED))
    pairs = list(zip(base, tuned, strict=True))
    return AfterRounds(
        rounds=rounds,
        rows=len(rows),
        groups=len(set(groups)),
        base=_figures(rounds, rows, BASE, feedback),
        tuned=_figures(rounds, rows, TUNED, feedback),
        right=_mean(difference_interval, [float(ours.right) - float(theirs.right) for theirs, ours in pairs], groups),
        anls=_mean(mean_interval, [ours.anls - theirs.anls for theirs, ours in pairs], groups),
    )


def _figures(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, feedback: bool) -> ModelFigures:
    answers = [pick(row.turns[rounds]) for row in rows]
    groups = [row.group for row in rows]
    changes = feedback and rounds > 0
    return ModelFigures(
        right=_mean(share_interval, [float(answer.right) for answer in answers], groups),
        exact_match=fmean(answer.exact_match for answer in answers),
        token_f1=fmean(answer.token_f1 for answer in answers),
        anls=_mean(mean_interval, [answer.anls for answer in answers], groups),
        relaxed_accuracy=fmean(answer.relaxed_accuracy for answer in answers),
        words=fmean(len(answer.answer.split()) for answer in answers),
        cut=sum(answer.cut for answer in answers),
        corrected=_change(rounds, rows, pick, False) if changes else None,
        spoiled=_change(rounds, rows, pick, True) if changes else None,
    )


def _change(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, right_first: bool) -> Change:
    """Return what became of the first answers that were right, or wrong, after k rounds."""
    some = [row for row in rows if pick(row.turns[0]).right == right_first]
    changed = [pick(row.turns[rounds]).right != right_first for row in some]
    rate = _mean(share_interval, [float(each) for each in changed], [row.group for row in some]) if some else None
    return Change(len(some), sum(changed), rate)


def _mean(kind: Kind, values: Sequence[float], groups: Sequence[str]) -> Interval:
    return intervals_of(kind(np.array(values)[:, None], Groups(groups)))[0]


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
    return rows, _said_of(base, every, of_base), _said_of(tuned, every, of_tuned)


def _asked(questions: Sequence[Question], model: Model, how: Asking) -> Answers:
    answers, new = answers_to(questions, model, how.pictures, how.max_tokens, how.store)
    log.info(f"answers of {model.name}: {new} of {len(answers)} were asked for now, the others before")
    return answers


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


def _said_of(model: Model, questions: Sequence[Question], answers: Answers) -> AskedModel:
    """Return a model with FIRE's measures of its answers in the rows' own dialogues, over all turns."""
    texts, references = [answers[question.key].text for question in questions], [each.reference for each in questions]
    return AskedModel(model.digest, overlap(texts, references))


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
    noun = "round" if feedback else "earlier question"
    return "at first" if not count else f"after {count} {noun}{'s' if count > 1 else ''}"
