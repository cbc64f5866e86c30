"""Converts FIRE's raw rows to one of the two training forms."""

from collections.abc import Sequence
from dataclasses import dataclass

from vlmflow.config.raw_forms import PICTURES
from vlmflow.config.row_settings import GOOD, RowLimits
from vlmflow.raw.row_keys import key_fault
from vlmflow.rows.chat import from_system
from vlmflow.rows.converted import ConvertedRow, MakeRows
from vlmflow.rows.fire_texts import with_sentences, without_thoughts
from vlmflow.rows.forms.fire import (
    FORM,
    NESTED,
    RawRow,
    Trajectory,
    read_trajectory,
    single_turn_row,
    timestep_rows,
    trajectory_row,
)
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.unread import Shape, Unread


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


def fire_rows(
    form: TrainingForm, limits: RowLimits, system_prompt: str | None = None, ignore_keys: Sequence[str] = ()
) -> MakeRows:
    """Return the converter of FIRE's raw rows.

    limits: apply to the whole trajectory, in both forms: the timestep form repeats its turns in many rows.
    system_prompt: the first turn of every row, if any. ignore_keys: see `form_rows`.
    """
    system = from_system(system_prompt)
    meanings = FORM.meanings_of(FORM.names({}))
    unread = Unread((RawRow, RawRow), NESTED, meanings, ignore_keys, ["student"])

    def make(identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        trajectory = read_trajectory(row, unread.shape.decode)
        shape: Shape | None = unread.shape
        if isinstance(trajectory, Reject) and trajectory.reason in ("bad_shape", "bad_json"):
            # The strict decoder refuses unread keys too: decide by the one that accepts them.
            shape = None
            if fault := key_fault(row, PICTURES):
                return Reject("duplicate_key", fault)
            trajectory = read_trajectory(row)
        if isinstance(trajectory, Reject):
            return trajectory
        if not form.trains(trajectory):
            return Reject("no_good_attempt", "")
        whole_answers = raw_feedback = False
        if form.thoughts == "drop":
            shorter = without_thoughts(trajectory)
            if isinstance(shorter, Reject):
                return shorter
            trajectory, whole_answers = shorter
        if form.feedback_form == "sentence":
            trajectory, raw_feedback = with_sentences(trajectory)
        turns = 2 * len(trajectory.attempts) + len(system)
        if turns > limits.max_turns:
            return Reject("too_many_turns", f"{turns} turns, at most {limits.max_turns} are allowed")
        if len(row) > limits.max_turn_chars and (longest := _longest_turn(trajectory)) > limits.max_turn_chars:
            return Reject("turn_too_long", f"a turn has {longest} characters, at most {limits.max_turn_chars}")
        if shape is None:
            unread.count(number, row)
        else:
            shape.rows += 1
        unread.unchanged(whole_answers, raw_feedback)
        unread.changed(trajectory.changes)
        differs = trajectory.score_field_differs
        return [
            ConvertedRow(
                id=made.id,
                source=made.source,
                images=made.images,
                attempts=made.attempts,
                scores=made.scores,
                conversations=system + made.conversations,
                raw_row=number,
                score_field_differs=differs,
            )
            for made in form.rows(identity, trajectory)
        ]

    return MakeRows(make, unread)


def _longest_turn(trajectory: Trajectory) -> int:
    """Return the characters of the longest turn; no training row contains the last feedback, which has no answer."""
    *earlier, last = trajectory.attempts
    texts = [text for attempt in earlier for text in (attempt.answer, attempt.feedback)]
    return max(map(len, [trajectory.question, last.answer, *texts]))
