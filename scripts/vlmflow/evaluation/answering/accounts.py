"""The files of `answers/RUN/SPLIT`: `rows.jsonl` and `report.json`; `left_out.jsonl` is as in `eval/RUN/SPLIT`."""

import msgspec

from vlmflow.evaluation.accounts import Interval
from vlmflow.evaluation.scoring.results import Overlap, Rule


class ModelAnswer(msgspec.Struct, frozen=True):
    """A model's answer. text: all that it said. answer: the answer in it. cut: whether it had not ended at max_tokens.

    The others are scores against the gold answer (`scoring.judge.Judgement`).
    """

    text: str
    answer: str
    cut: bool
    right: bool
    exact_match: bool
    token_f1: float
    anls: float
    relaxed_accuracy: bool


class AnsweredTurn(msgspec.Struct, frozen=True):
    """One turn that both models answered, after the row's own turns before it.

    rounds: of feedback before it; without feedback, earlier questions. prompt: the human's turn: the question, then
    feedback. reference: the row's own turn, which is the history of later ones. gold: the right answer: the raw row's,
    or that of the row's last turn; without feedback that of the reference. rule: by which answers are compared with it.
    """

    rounds: int
    prompt: str
    reference: str
    gold: str
    rule: Rule
    base: ModelAnswer
    tuned: ModelAnswer


class AnsweredRow(msgspec.Struct, frozen=True):
    """A line of `rows.jsonl`. id, source, images: those of the row; images are names in the picture store.

    group: rows with the same picture, or without one the same question, have the same. holds_gold: whether the
    feedback before the last answered turn holds the gold answer; null if there is none.
    """

    id: str
    source: str
    images: list[str]
    group: str
    holds_gold: bool | None
    turns: list[AnsweredTurn]


class Change(msgspec.Struct, frozen=True):
    """What became of first answers of one kind. first: how many there are. changed: how many of them are otherwise now.

    rate: changed / first, with its interval; null where first is 0.
    """

    first: int
    changed: int
    rate: Interval | None


class ModelFigures(msgspec.Struct, frozen=True):
    """A model's answers after k rounds. cut: answers that did not end. words: how many an answer has, on average.

    right, exact_match, token_f1, anls, relaxed_accuracy: means over rows, 0 to 1 (`scoring.judge.Judgement`).
    corrected: first answers that were wrong, and are right after k rounds. spoiled: the other way round. Both are null
    at k = 0 and without feedback. The history is the row's own, so they are no dialogue of the model's.
    """

    right: Interval
    exact_match: float
    token_f1: float
    anls: Interval
    relaxed_accuracy: float
    words: float
    cut: int
    corrected: Change | None
    spoiled: Change | None


class AfterRounds(msgspec.Struct, frozen=True):
    """Both models after k rounds of feedback. rounds: k. rows, groups: how many have so many rounds.

    right, anls: tuned - base, per row.
    """

    rounds: int
    rows: int
    groups: int
    base: ModelFigures
    tuned: ModelFigures
    right: Interval
    anls: Interval


class AskedModel(msgspec.Struct, frozen=True):
    """A model. digest: of its files. overlap: of its answers with the rows' own turns, over all turns."""

    digest: str
    overlap: Overlap


class AnswerReport(msgspec.Struct, frozen=True):
    """The content of `answers/RUN/SPLIT/report.json`.

    rows, groups: answered ones. left_out: rows of the split that are out, by reason. feedback: whether rows have
    feedback. gold_from_raw: rows whose gold answer is that of the raw row. holds_gold: the share of rows whose feedback
    holds the gold answer; null if none was shown. all: the figures of all rows. without_gold, with_gold: of the rows
    whose feedback does not hold it, and does; null if there are none. sources, rules: by source, and by the rule of the
    gold answer.
    server: what answered. picture_limits: "4 to 64 tokens", the keys with limits in the processor's file as
    JSON, "the model's own", "unknown" with another server, or "no pictures".
    not_applied: arguments of the training's template that a server does not apply. looks: how often the data set's test
    split was looked at so far; null for val. The others are as in `EvaluationReport`.
    """

    run: str
    dataset: str
    split: str
    rows: int
    groups: int
    left_out: dict[str, int]
    feedback: bool
    gold_from_raw: int
    holds_gold: float | None
    all: list[AfterRounds]
    without_gold: list[AfterRounds] | None
    with_gold: list[AfterRounds] | None
    sources: dict[str, list[AfterRounds]]
    rules: dict[str, list[AfterRounds]]
    looks: int | None
    rows_digest: str
    base: AskedModel
    tuned: AskedModel
    server: str
    picture_limits: str
    not_applied: list[str]
    max_tokens: int
    dtype: str
    device: str
    seed: int
    versions: dict[str, str]
