"""The files in which an evaluation records its results: `rows.jsonl`, `left_out.jsonl` and `report.json`."""

from collections.abc import Mapping

import msgspec

HISTORY, QUESTION, PLACEBO, FIRST = "history", "question", "placebo", "first"
ANSWER = "answer"
"""The passes of a row: what stands before the answer that is scored. history: all of it. question: the question alone.
placebo: all of it, with another row's feedback. first: the question, and the first answer is scored. A data set without
feedback has one pass: answer."""

SAME_ANSWER = (HISTORY, QUESTION, PLACEBO)
"""The passes that score the same answer."""


class Loss(msgspec.Struct, frozen=True):
    """The loss of an answer. nats: minus the log-probability of its tokens, in sum. tokens: how many there are."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """The loss per token, in nats."""
        return self.nats / self.tokens


Losses = dict[str, Loss]
"""The losses of a row by pass."""


def use_of_feedback(losses: Losses) -> float:
    """Return the loss given the row's own feedback, minus that given another row's; below zero if it is used."""
    return losses[HISTORY].per_token - losses[PLACEBO].per_token


class EvaluatedRow(msgspec.Struct, frozen=True):
    """A line of `rows.jsonl`.

    id, source, images: those of the row. group: rows with the same picture, or without one the same question, have the
    same. donor: the id of the row whose feedback is the placebo; null in a data set without feedback.
    base, tuned: the losses of both models.
    """

    id: str
    source: str
    images: list[str]
    group: str
    donor: str | None
    base: Losses
    tuned: Losses


class LeftOut(msgspec.Struct, frozen=True):
    """A line of `left_out.jsonl`: a row that is out for both models.

    reason: no_feedback, earlier_attempt, single_turn, no_donor, over_long, or not_drawn. detail: the cause, for people.
    """

    id: str
    reason: str
    detail: str


WHY_OUT = {
    "no_feedback": "without feedback",
    "single_turn": "with an answer of a dialogue that is evaluated as a whole",
    "earlier_attempt": "with an earlier attempt of a dialogue whose last one is evaluated",
    "no_donor": (
        "without a donor (a donor gives the placebo: another row of the same source, with as many turns of feedback "
        "and the same score, but with another picture or question and another right answer)"
    ),
    "over_long": "longer than train.max_length",
    "not_drawn": "not drawn",
}
"""The reasons for which rows are out, for people: words that follow "row(s)"."""


def left_out_in_words(left_out: Mapping[str, int]) -> str:
    """Return how many rows are out and why, for people. left_out: rows by reason."""
    return "; ".join(f"{count:,} row(s) {WHY_OUT.get(reason, reason)}" for reason, count in left_out.items()) or "none"


class Interval(msgspec.Struct, frozen=True):
    """A mean over rows, in nats per token, and its 95 % interval; low, high: null if there are too few groups."""

    mean: float
    low: float | None
    high: float | None

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.high is not None and self.high < 0

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low is not None and self.low > 0


class Figures(msgspec.Struct, frozen=True):
    """The figures of some rows; losses are means over rows of nats per token.

    rows, groups: how many. base, tuned: the losses by pass. difference: tuned - base by pass, below zero if the tuned
    model is better. base_uses, tuned_uses: the loss given the row's own feedback minus that given another row's
    (history - placebo). learned: tuned_uses - base_uses. The last three are null in a data set without feedback.
    """

    rows: int
    groups: int
    base: dict[str, float]
    tuned: dict[str, float]
    difference: dict[str, Interval]
    base_uses: Interval | None
    tuned_uses: Interval | None
    learned: Interval | None


class EvaluatedModel(msgspec.Struct, frozen=True):
    """A model. digest: of its files (`fetch.model_folder.digest_of`)."""

    digest: str


class EvaluationReport(msgspec.Struct, frozen=True):
    """The content of `eval/RUN/SPLIT/report.json`.

    verdict: "learned", "used already", "not shown" or "worse" (`evaluation.verdict`). sentence: the same for people.
    rows, groups: evaluated ones. left_out: rows of the split that are out, by reason. feedback: whether rows have
    feedback. all: the figures of all rows. sources: the same by source.
    looks: how often the data set's test split was looked at so far, this time included, so that no two reports on
    test are the same; null for val.
    rows_digest: SHA-256 of the split's file. seed: of the draw, the donors and the intervals. dtype, device,
    image_max_tokens, max_length: those of the run. versions: of packages, by name.
    """

    run: str
    dataset: str
    split: str
    verdict: str
    sentence: str
    rows: int
    groups: int
    left_out: dict[str, int]
    feedback: bool
    all: Figures
    sources: dict[str, Figures]
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
