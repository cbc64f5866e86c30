"""What evaluations keep: their results, and what was computed for them, so that nothing is computed twice.

    <stores.evaluations>/<work>/<digest of a model and how it is computed>/<time>-<random>.jsonl

Each computing process writes a file of its own there, a line for each result, so writers need no lock; a line that a
kill cut is left out when the files are read. `eval/RUN/SPLIT` has `rows.jsonl`, `left_out.jsonl` and `report.json`;
`answers/RUN/SPLIT` has the same for answers. `stores.evaluations/looks.jsonl` counts each evaluation of a test split:
who looks at it again and again, and keeps the run with the best figure, has trained on it, and nobody can prevent that.
"""

import fcntl
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from vlmflow.config.after_training import Measure
from vlmflow.core.errors import counted
from vlmflow.evaluation.scoring.stated import Judgement, Overlap, Rule


class Keyed(msgspec.Struct, frozen=True):
    """A line that is kept. key: what it is the result of."""

    key: str


Line = TypeVar("Line", bound=Keyed)
Form = TypeVar("Form")


class KeptLines(Generic[Line]):
    """The results of one model, computed in one way.

    store: `stores.evaluations`. work: the name of a folder there. meaning: everything but the key that determines a
    result, as JSON: the model's digest, types, limits, versions. form: the type of a line.
    """

    def __init__(self, store: Path, work: str, meaning: dict[str, Any], form: type[Line]) -> None:
        digest = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = store / work / digest
        self._form = form

    def new_file(self) -> Path:
        """Return the name of a new file for one process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.jsonl"

    def read(self) -> dict[str, Line]:
        """Return all whole lines, by their keys."""
        files = sorted(self._folder.glob("*.jsonl"))
        return {kept.key: kept for file in files for kept in whole_lines(file, self._form)}


def whole_lines(file: Path, form: type[Form]) -> Iterator[Form]:
    """Yield the lines of a file, decoded as `form`, without those that a kill cut."""
    decoder = msgspec.json.Decoder(form)
    for line in file.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            with suppress(ValueError):  # DecodeError, or bytes that are no text
                yield decoder.decode(line)


QUESTION, OWN, NEUTRAL, OTHER_PICTURE = "question", "own", "neutral", "other_picture"
OTHERS = ("other", "other_2", "other_3")
"""The context of the scored answers. question: the question alone; in a data set without feedback the whole row. own:
all turns, with the row's own feedback. neutral: the same with feedback that only says that the answer is wrong. others:
the same with the feedback of another row, of up to three. other_picture: the same as own (without feedback as
question), with another row's picture."""


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

    @property
    def preference(self) -> float:
        """The same as a probability, 0 to 1: σ of the margin, or of a row with one answer p(right) per token."""
        return math.exp(self.value) if self.wrong is None else (1 + math.tanh(self.value / 2)) / 2


class EvaluatedRow(msgspec.Struct, frozen=True):
    """A line of `rows.jsonl`: a row as both models see it.

    id, source, images: those of the row. group: rows with the same picture, or without one the same question, have the
    same. right, wrong: the texts that are scored; wrong is null in a row with one answer, and both are in a data set
    without feedback, where all answers are scored. donors: the ids of the rows whose feedback is the control of each
    context of OTHERS. picture_donor: that of the row whose picture is; null without. gold_in_feedback: whether the
    row's feedback contains the gold answer. echo: the words that the right answer has from its feedback alone
    (`choice.echoes`). base, tuned: the margins by context. A context that a row does not have is in neither: question
    alone without feedback, no other picture without a partner that has one.
    """

    id: str
    source: str
    images: list[str]
    group: str
    right: str | None
    wrong: str | None
    picture_donor: str | None
    gold_in_feedback: bool
    base: dict[str, Margin]
    tuned: dict[str, Margin]
    donors: list[str] = []
    echo: list[str] = []


class LeftOut(msgspec.Struct, frozen=True):
    """A line of `left_out.jsonl`: a row that is out for both models.

    reason: a key of WHY_OUT. detail: the cause, for people.
    """

    id: str
    reason: str
    detail: str


CHOICE = "account.json"
"""The account in a folder chosen/RUN/SPLIT."""


class Choice(msgspec.Struct, frozen=True):
    """The content of `chosen/RUN/SPLIT/account.json`: on how many rows a verdict can rest.

    rows, groups: rows that can be evaluated, and their pictures or questions; of val those of the half that judges.
    all_groups: pictures or questions of all rows, likewise.
    groups_without_echo: pictures or questions of those without echo (`choice.echoes`). left_out: the other rows of the
    split, by reason. feedback: whether rows have feedback. rows_digest: SHA-256 of the split's file.
    """

    run: str
    dataset: str
    split: str
    rows_digest: str
    feedback: bool
    rows: int
    groups: int
    groups_without_echo: int
    all_groups: int
    left_out: dict[str, int]


WHY_OUT = {
    "trained_before": "whose picture or question a base of the run was trained on",
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


class Share(msgspec.Struct, frozen=True):
    """The share of rows in which the tuned model is above its base; a row where both are equal counts one half.

    rows, groups: how many. different: rows in which the models differ.
    """

    rows: int
    groups: int
    different: int
    share: Interval


class OneAnswer(msgspec.Struct, frozen=True):
    """Of rows without a wrong answer. fell: where the loss of the answer is smaller. loss: its mean, in nats per token.

    It is the loss with the row's own feedback; in data without feedback, after the row's own turns.
    """

    fell: Share
    loss: Compared


SHARES = get_args(Measure)
"""The names of shares of rows (`MarginFigures`)."""


class MarginFigures(msgspec.Struct, frozen=True):
    """The figures of some rows.

    right_first, right_with_feedback: the share of rows with a margin above 0, to the question alone and after the own
    feedback; of rows that have a wrong answer. uses_feedback: the share whose margin is larger after the own feedback
    than after another row's, on average over the row's donors. adds: the share whose preference is larger after the own
    feedback than after neutral feedback. helps: the same of the own feedback and the question alone. sees: the share
    whose margin is larger with the own picture than with another row's. own: the share whose margin with the own
    feedback is larger than the base's. one_answer: of rows without a wrong answer. Each is None if no row can tell, and
    what a report of an earlier version does not have.
    losses: the loss of the right answer by context, in nats per token.
    """

    rows: int
    groups: int
    right_first: Compared | None
    right_with_feedback: Compared | None
    uses_feedback: Compared | None
    sees: Compared | None
    losses: dict[str, Compared]
    adds: Compared | None = None
    helps: Compared | None = None
    own: Share | None = None
    one_answer: OneAnswer | None = None

    @property
    def shares(self) -> dict[str, Compared]:
        """The shares that the rows can tell, by name."""
        return {name: share for name in SHARES if (share := getattr(self, name)) is not None}


class MarginReport(msgspec.Struct, frozen=True):
    """All figures of an evaluation.

    with_gold, without_gold: of the rows whose feedback contains the gold answer, and of the others. with_echo,
    without_echo: of the rows with echo, and of the others. None without such rows; both of a pair if all rows lack it.
    sources: by source, and in a mixture also by data set; so wide that all of their intervals hold together in 95 %.
    """

    all: MarginFigures
    without_gold: MarginFigures | None
    sources: dict[str, MarginFigures]
    with_gold: MarginFigures | None = None
    with_echo: MarginFigures | None = None
    without_echo: MarginFigures | None = None

    @property
    def without_any_echo(self) -> MarginFigures | None:
        """The figures of the rows without echo, be they all; None if all rows have echo."""
        return self.without_echo if self.with_echo else self.all


class EvaluatedModel(msgspec.Struct, frozen=True):
    """A model. digest: of its files (`fetch.placed.digest_of`)."""

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


State = Literal["met", "refuted", "open"]


class Condition(msgspec.Struct, frozen=True):
    """Whether a condition of "learned" is met: in all rows, and in those without echo."""

    all: State
    without_echo: State


class EvaluationReport(msgspec.Struct, frozen=True):
    """The content of `eval/RUN/SPLIT/report.json`.

    verdict: "learned", "worse", "no gain shown", "too few rows" or "too few rows without echo" (`evaluation.verdict`).
    costs_first_answers: whether that is shown besides. sentence: both for people. conditions: of "learned", by name, on
    data with feedback. rows, groups: evaluated ones. left_out: rows of the split that are
    out, by reason. feedback: whether rows have feedback. figures: on what the verdict rests.
    looks: how often the data set's test split was looked at so far, this time included, so that no two reports on
    test are the same; null for val. also_chose: by what these rows chose the model, too; null if they chose nothing: on
    test, and on val where a half of it judges (`rows.holdout`).
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
    conditions: dict[str, Condition] = {}


class ModelAnswer(Judgement, frozen=True):
    """A model's answer, with its scores against the gold answer.

    text: all that it said. answer: the answer in it. cut: whether it had not ended at max_tokens.
    """

    text: str
    answer: str
    cut: bool


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

    right, exact_match, token_f1, anls, relaxed_accuracy: means over rows, 0 to 1 (`scoring.stated.Judgement`).
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


LOG = "looks.jsonl"


class Look(msgspec.Struct, frozen=True):
    """One look.

    time: in UTC. what: evaluate or answer. rows_digest: SHA-256 of the test split's file. model: digest of the tuned
    model.
    """

    time: str
    what: str
    run: str
    dataset: str
    rows_digest: str
    model: str


def record_look(store: Path, what: str, run: str, dataset: str, rows_digest: str, model: str) -> int:
    """Append a look, and return how many there are at this data set's test split with these rows, this one included.

    store: `stores.evaluations`. The other parameters are fields of `Look`.
    """
    look = Look(datetime.now(UTC).isoformat(timespec="seconds"), what, run, dataset, rows_digest, model)
    store.mkdir(parents=True, exist_ok=True)
    with (store / LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if not (b"\n" + (store / LOG).read_bytes()).endswith(b"\n"):  # a kill cut the last line
            log.write(b"\n")
        log.write(msgspec.json.encode(look) + b"\n")
        log.flush()
        os.fsync(log.fileno())
        return sum(look.rows_digest == rows_digest for look in read_looks(store))


def read_looks(store: Path) -> list[Look]:
    """Return all looks; lines that a kill cut are left out."""
    return list(whole_lines(store / LOG, Look)) if (store / LOG).exists() else []
