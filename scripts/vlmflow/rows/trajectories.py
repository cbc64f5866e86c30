"""Trajectories: attempts at a question, each with feedback and a score; and the training rows made from them.

There are millions of these objects, and they have no reference cycles, so the garbage collector does not track them
(gc=False), which halves the time.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from vlmflow.config.row_settings import GOOD
from vlmflow.rows.chat import FIRST_LINE, Turn
from vlmflow.rows.raw_text import SINGLE_TURN
from vlmflow.rows.sharegpt import ShareGptRow

SCORE = re.compile(
    r"\bScore[\s*_]{0,3}:[\s*_]{0,3}(\d+)(?:\s*(?:/|out of)\s*(\d+))?(?![\d,–%-]|\.\d|e\d|\s*(?:/|out of))",
    re.IGNORECASE,
)
"""`Score: 5.`, `Score: 5/10.` or `Score: 5 out of 10`; other numbers (5.5, 5-7, 5%) are not scores."""


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """An answer of the student, and the teacher's feedback on it. score: 0 to 10."""

    answer: str
    feedback: str
    score: int


class Trajectory(msgspec.Struct, frozen=True, gc=False):
    """The content of one raw row.

    image: the picture's path in the row.
    question: the question without picture tags.
    score_field_differs: whether the row's field `score` differs from the scores in the texts, which are used.
    changes: the rules that changed a text (`raw_text.RULES`).
    """

    image: str
    question: str
    source: str
    attempts: list[Attempt]
    score_field_differs: bool
    changes: frozenset[str] = frozenset()

    def longest_turn(self) -> int:
        """Return the characters of the longest turn; no training row has the last feedback, which has no answer."""
        *earlier, last = self.attempts
        texts = [text for attempt in earlier for text in (attempt.answer, attempt.feedback)]
        return max(map(len, [self.question, last.answer, *texts]))


@dataclass(frozen=True)
class TrainingForm:
    """How a trajectory becomes training rows: settings of the data set (`config.data_settings`).

    form: "trajectory" or "timestep". max_history_rounds: the trajectory form ignores it. single_turn:
    "last_good" or None. thoughts: "keep" or "drop". feedback_form: "raw" or "sentence".
    """

    form: str
    max_history_rounds: int | None = None
    min_score: int | None = None
    single_turn: str | None = None
    thoughts: str = "keep"
    feedback_form: str = "raw"

    def trains(self, trajectory: Trajectory) -> bool:
        """Return whether any attempt is trained."""
        return self.min_score is None or any(attempt.score >= self.min_score for attempt in trajectory.attempts)

    def rows(self, identity: str, trajectory: Trajectory) -> list[ShareGptRow]:
        """Return the rows of a trajectory of which an attempt is trained. identity: the id of the raw row."""
        if self.form == "timestep":
            rows = timestep_rows(identity, trajectory, self.max_history_rounds, self.min_score)
        else:
            rows = [trajectory_row(identity, trajectory, self.min_score)]
        return rows if self.single_turn is None else rows + self._single_turn(identity, trajectory)

    def _single_turn(self, identity: str, trajectory: Trajectory) -> list[ShareGptRow]:
        """Return the row of the last good attempt; none if no attempt is good, or the first is it.

        The first attempt is trained without feedback in any case: a second row would only train it twice.
        """
        least = GOOD if self.min_score is None else self.min_score
        good = [number for number, attempt in enumerate(trajectory.attempts, start=1) if attempt.score >= least]
        if not good or good[-1] == 1:
            return []
        marked = self.form == "trajectory" and self.min_score is not None
        return [single_turn_row(identity, trajectory, good[-1], marked)]


def read_score(feedback: str) -> int | None:
    """Return the score in a feedback's text, 0 to 10; None if there is none, or if it is larger or not out of 10."""
    found = SCORE.search(feedback)
    if found is None:
        return None
    score, of = found.groups()
    if of not in (None, "10") or len(score) > 2 or (number := int(score)) > 10:
        return None
    return number


def trajectory_row(identity: str, trajectory: Trajectory, min_score: int | None = None) -> ShareGptRow:
    """Return the whole trajectory as one conversation, without the last feedback, which has no answer.

    min_score: only attempts of at least this score are trained, of which there is one at least: `loss` of each answer
    says which, and the conversation ends with the last of them.
    """
    attempts = trajectory.attempts
    if min_score is None:
        return _row(identity, trajectory, 0, len(attempts))
    trained = [attempt.score >= min_score for attempt in attempts]
    row = _row(identity, trajectory, 0, len(attempts) - trained[::-1].index(True))
    for turn, loss in zip(row.conversations[1::2], trained, strict=False):
        turn.loss = loss
    return row


def timestep_rows(
    identity: str, trajectory: Trajectory, max_history_rounds: int | None, min_score: int | None = None
) -> list[ShareGptRow]:
    """Return one row per attempt (full-state behaviour cloning, FIRE's section 4).

    A row has the question, the last `max_history_rounds` attempts (None: all) before its own with their feedback, and
    its own answer, the target, without the feedback on it. Attempts keep their numbers. min_score: only attempts of at
    least this score are targets.
    """
    attempts = trajectory.attempts
    history = len(attempts) if max_history_rounds is None else max_history_rounds
    return [
        _row(f"{identity}-a{last}", trajectory, max(0, last - 1 - history), last)
        for last, attempt in enumerate(attempts, start=1)
        if min_score is None or attempt.score >= min_score
    ]


def single_turn_row(identity: str, trajectory: Trajectory, attempt: int, marked: bool) -> ShareGptRow:
    """Return the question with one attempt, without what came before it.

    attempt: its number, from 1. marked: whether the answer has `loss`, as those of the data set's other rows.
    """
    row = _row(identity + SINGLE_TURN, trajectory, attempt - 1, attempt)
    if marked:
        row.conversations[-1].loss = True
    return row


def _row(identity: str, trajectory: Trajectory, first: int, last: int) -> ShareGptRow:
    """Return the conversation of the attempts from index `first` to `last`, which is excluded."""
    attempts = trajectory.attempts[first:last]
    turns = [Turn("human", FIRST_LINE + trajectory.question), Turn("gpt", attempts[0].answer)]
    for before, attempt in pairwise(attempts):
        turns += [Turn("human", before.feedback), Turn("gpt", attempt.answer)]
    return ShareGptRow(
        id=identity,
        source=trajectory.source,
        images=[trajectory.image],
        attempts=list(range(first + 1, last + 1)),
        scores=[attempt.score for attempt in attempts],
        conversations=turns,
    )
