"""The files in which an evaluation records its results: `rows.jsonl`, `left_out.jsonl` and `report.json`."""

from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from vlmflow.core.printable import counted

QUESTION, OWN, OTHER, OTHER_PICTURE = "question", "own", "other", "other_picture"
"""The context of the scored answers. question: the question alone; in a data set without feedback the
whole row. own: all turns, with the row's own feedback. other: the same with another row's feedback. other_picture: the
same as own (without feedback as question), with another row's picture."""


class Loss(msgspec.Struct, frozen=True):
    """The loss of an answer. nats: minus the log-probability of its tokens, in sum. tokens: how many there are."""

    nats: float
    tokens: Annotated[int, msgspec.Meta(ge=1)]

    @property
    def per_token(self) -> float:
        """The loss per token, in nats."""
        return self.nats / self.tokens


class Margin(msgspec.Struct, frozen=True):
    """The losses of a row's right and wrong answer in one context; wrong: None in a row with one answer."""

    right: Loss
    wrong: Loss | None

    @property
    def value(self) -> float:
        """Log p(right) per token, minus log p(wrong) per token if there is a wrong answer."""
        return (0.0 if self.wrong is None else self.wrong.per_token) - self.right.per_token


class EvaluatedRow(msgspec.Struct, frozen=True):
    """A line of `rows.jsonl`: a row as both models see it.

    id, source, images: those of the row. group: rows with the same picture, or without one the same question, have the
    same. right, wrong: the texts that are scored; wrong is null in a row with one answer, and both are in a data set
    without feedback, where all answers are scored. donor, picture_donor: the ids of the rows whose feedback and whose
    picture are the controls; null without. gold_in_feedback: whether the row's feedback contains the gold answer.
    base, tuned: the margins by context. A context that a row does not have is in neither: question alone without
    feedback, no other picture without a partner that has one.
    """

    id: str
    source: str
    images: list[str]
    group: str
    right: str | None
    wrong: str | None
    donor: str | None
    picture_donor: str | None
    gold_in_feedback: bool
    base: dict[str, Margin]
    tuned: dict[str, Margin]


class LeftOut(msgspec.Struct, frozen=True):
    """A line of `left_out.jsonl`: a row that is out for both models.

    reason: a key of WHY_OUT. detail: the cause, for people.
    """

    id: str
    reason: str
    detail: str


WHY_OUT = {
    "no_feedback": "without feedback",
    "no_right": "without an answer that scored at least 8 after feedback",
    "no_wrong": "without a wrong answer before the right one: one that scored at most 5 and says something else",
    "single_turn": "with an answer of a dialogue that is evaluated as a whole",
    "earlier_attempt": "with an earlier attempt of a dialogue whose last one is evaluated",
    "no_donor": (
        "without another row's feedback as a control (a row of the same source, with as many turns of feedback and the "
        "same scores, but with another picture or question, another right answer and other feedback; each gives once)"
    ),
    "other_half": "of the other half of val, of which one chooses and one judges",
    "over_long": "longer than train.max_length",
    "not_drawn": "not drawn",
}
"""The reasons for which rows are out, for people: words that follow "rows"."""


def left_out_in_words(left_out: Mapping[str, int]) -> str:
    """Return how many rows are out and why, for people. left_out: rows by reason."""
    return (
        "; ".join(f"{counted(count, 'row')} {WHY_OUT.get(reason, reason)}" for reason, count in left_out.items())
        or "none"
    )


FEWEST_GROUPS = 100
"""With fewer groups there is no interval: with skewed values 95 % intervals of 20 groups held the truth in 83 %."""

FEWEST_EFFECTIVE = 50
"""With fewer effective groups (`intervals.Groups`), as where half of all rows have one picture, there is none."""


class Interval(msgspec.Struct, frozen=True):
    """A mean or a share over rows, and its 95 % interval; low, high: null if there are too few groups for one."""

    mean: float
    low: float | None
    high: float | None

    def ends(self, form: Callable[[float], str]) -> str:
        """Return both ends, behind a blank and in brackets, for people; "" without them."""
        return "" if self.low is None or self.high is None else f" [{form(self.low)}, {form(self.high)}]"

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.high is not None and self.high < 0

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low is not None and self.low > 0


class Compared(msgspec.Struct, frozen=True):
    """A share of rows, or a mean loss, of both models on the same rows.

    rows, groups: how many. different: rows in which the models differ. difference: tuned minus base.
    """

    rows: int
    groups: int
    different: int
    base: Interval
    tuned: Interval
    difference: Interval


SHARES = ("right_first", "right_with_feedback", "uses_feedback", "sees")
"""The names of shares of rows (`MarginFigures`)."""


class MarginFigures(msgspec.Struct, frozen=True):
    """The figures of some rows.

    right_first, right_with_feedback: the share of rows with a margin above 0, to the question alone and after the own
    feedback; of rows that have a wrong answer. uses_feedback: the share whose margin is larger after the own feedback
    than after another row's. sees: the same of the own and another row's picture. Each is None if no row can tell.
    losses: the loss of the right answer by context, in nats per token.
    """

    rows: int
    groups: int
    right_first: Compared | None
    right_with_feedback: Compared | None
    uses_feedback: Compared | None
    sees: Compared | None
    losses: dict[str, Compared]

    @property
    def shares(self) -> dict[str, Compared]:
        """The shares that the rows can tell, by name."""
        return {name: found for name in SHARES if (found := getattr(self, name)) is not None}


class MarginReport(msgspec.Struct, frozen=True):
    """All figures of an evaluation.

    without_gold: of the rows whose feedback does not contain the gold answer; None if there are none, or all are such
    rows. sources: by source, and in a mixture also by data set.
    """

    all: MarginFigures
    without_gold: MarginFigures | None
    sources: dict[str, MarginFigures]


class EvaluatedModel(msgspec.Struct, frozen=True):
    """A model. digest: of its files (`fetch.model_folder.digest_of`)."""

    digest: str


class AlsoChose(msgspec.Struct, frozen=True):
    """By what the evaluated rows also chose the model that they judge.

    evaluations: of the training, the best of which is its checkpoint. trials: of the search that chose the settings
    (`runs.NAME.chosen_by`); 1 without a search.
    """

    evaluations: int
    trials: int

    @property
    def in_words(self) -> str:
        """A sentence for people."""
        of_search = f", and its settings, of {self.trials:,} trials of a search" if self.trials > 1 else ""
        return (
            f"Val also chose the checkpoint, by {counted(self.evaluations, 'evaluation')}{of_search}: this flatters it."
        )


class EvaluationReport(msgspec.Struct, frozen=True):
    """The content of `eval/RUN/SPLIT/report.json`.

    verdict: "learned", "worse", "no gain shown" or "too few rows" (`evaluation.verdict`). costs_first_answers: whether
    that is shown besides. sentence: both for people. rows, groups: evaluated ones. left_out: rows of the split that are
    out, by reason. feedback: whether rows have feedback. figures: on what the verdict rests.
    looks: how often the data set's test split was looked at so far, this time included, so that no two reports on
    test are the same; null for val. also_chose: by what these rows chose the model, too; null if they chose nothing: on
    test, and on val where a half of it judges (`rows.halves`).
    rows_digest: SHA-256 of the split's file. seed: of the draw and the donors. dtype, device,
    image_max_tokens, max_length: those of the run. versions: of packages, by name.
    """

    run: str
    dataset: str
    split: str
    verdict: str
    costs_first_answers: bool
    sentence: str
    rows: int
    groups: int
    left_out: dict[str, int]
    feedback: bool
    figures: MarginReport
    looks: int | None
    rows_digest: str
    base: EvaluatedModel
    tuned: EvaluatedModel
    seed: int
    dtype: str
    device: str
    image_max_tokens: int
    max_length: int
    versions: dict[str, str]
    also_chose: AlsoChose | None = None
