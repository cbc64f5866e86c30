"""FIRE's raw form: trajectories.

The raw form is known from the data set itself (https://huggingface.co/datasets/PengxiangLi/FIRE, arXiv:2407.11522):
student and teacher alternate strictly, and the teacher's text contains the score.
"""

from typing import Any

import msgspec

from vlmflow.config.raw_forms import TRAINED, RawForm
from vlmflow.raw.named import source_of
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import ConvertedRow, HowToConvert, RowsOf
from vlmflow.rows.raw_text import clean, cleaned, untagged
from vlmflow.rows.trajectories import (
    Attempt,
    Trajectory,
    is_trained,
    read_score,
    training_rows,
    with_sentences,
    without_thoughts,
)


class RawTurn(msgspec.Struct, gc=False):
    """A turn in FIRE's form. Its key `type` repeats the role and is not read."""

    role: str
    value: str


class RawRow(msgspec.Struct, gc=False):
    """A row in FIRE's form. `source` and `score` may have any type: no fault in them makes a row unusable."""

    image: str
    question: RawTurn
    conversations: list[RawTurn]
    source: Any = msgspec.UNSET
    score: Any = msgspec.UNSET


ROW = msgspec.json.Decoder(RawRow)


class _GoldRow(msgspec.Struct, gc=False):
    """The part of a row with the right answer, which is shorter than the student's last one."""

    groundtruth: RawTurn


GOLD = msgspec.json.Decoder(_GoldRow)


def read_gold(row: bytes) -> str | None:
    """Return the right answer to a row's question, cleaned; None if there is none. Raises nothing."""
    try:
        return clean(GOLD.decode(row).groundtruth.value).lstrip() or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def trajectory_of(raw: RawRow) -> Trajectory | Reject:
    """Return the content of a raw row, or why the row cannot be used."""
    if not raw.image:
        return Reject("bad_shape", "image is empty")
    if raw.question.role != "user":
        return Reject("wrong_role", f"question.role is {raw.question.role[:40]!r}, not 'user'")
    texts, changes = cleaned([raw.question.value, *[turn.value for turn in raw.conversations]])
    question, moved = untagged(texts[0])
    if not question:
        return Reject("empty_turn", "question.value holds no text")
    attempts = _attempts(raw.conversations, texts[1:])
    if isinstance(attempts, Reject):
        return attempts
    return Trajectory(
        image=raw.image,
        question=question,
        source=source_of(raw.source, [raw.image]),
        attempts=attempts,
        score_field_differs=raw.score is not None
        and raw.score is not msgspec.UNSET
        and raw.score != [attempt.score for attempt in attempts],
        changes=changes | moved if moved else changes,
    )


def _attempts(turns: list[RawTurn], texts: list[str]) -> list[Attempt] | Reject:
    """Return the attempts of a trajectory. texts: the cleaned texts of its turns."""
    roles = [turn.role for turn in turns]
    wanted = (["student", "teacher"] * len(turns))[: len(turns)]
    if roles != wanted:
        number, role = next((number, role) for number, role in enumerate(roles) if role != wanted[number])
        return Reject("wrong_role", f"conversations[{number}].role is {role[:40]!r}, not {wanted[number]!r}")
    if not turns or len(turns) % 2:
        return Reject("unbalanced_turns", f"conversations has {len(turns)} turns, not pairs of answer and feedback")
    if "" in texts:
        return Reject("empty_turn", f"conversations[{texts.index('')}].value holds no text")
    answers, feedbacks = texts[::2], texts[1::2]
    scores = [read_score(feedback) for feedback in feedbacks]
    if None in scores:
        number = scores.index(None)
        return Reject("unreadable_score", f"conversations[{2 * number + 1}].value begins {feedbacks[number][:40]!r}")
    return list(map(Attempt, answers, feedbacks, scores))  # type: ignore[arg-type]  # none of the scores is None


def read_trajectory(row: bytes) -> Trajectory | Reject:
    """Return the content of a raw row, or why it cannot be used. Raises nothing, whatever the bytes are."""
    try:
        return trajectory_of(ROW.decode(row))
    except msgspec.ValidationError as error:
        return Reject("bad_shape", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Reject("bad_json", str(error))


def make_rows(how: HowToConvert) -> RowsOf:
    """Return the converter of FIRE's rows.

    The limits of rows apply to the whole trajectory, in both forms: the timestep form repeats its turns in many rows.
    """
    limits, unread = how.settings.row_limits, how.unread

    def rows_of(identity: str, number: int, raw: RawRow, size: int) -> list[ConvertedRow] | Reject:
        trajectory = trajectory_of(raw)
        if isinstance(trajectory, Reject):
            return trajectory
        if not is_trained(trajectory, how.settings.min_score):
            return Reject("no_good_attempt", "")
        whole_answers = raw_feedback = False
        if how.settings.thoughts == "drop":
            shorter = without_thoughts(trajectory)
            if isinstance(shorter, Reject):
                return shorter
            trajectory, whole_answers = shorter
        if how.settings.feedback_form == "sentence":
            trajectory, raw_feedback = with_sentences(trajectory)
        turns = 2 * len(trajectory.attempts) + len(how.system)
        if turns > limits.max_turns:
            return Reject("too_many_turns", f"{turns} turns, at most {limits.max_turns} are allowed")
        if size > limits.max_turn_chars and (longest := trajectory.longest_turn()) > limits.max_turn_chars:
            return Reject("turn_too_long", f"a turn has {longest} characters, at most {limits.max_turn_chars}")
        unread.account.whole_answers += whole_answers
        unread.account.raw_feedback += raw_feedback
        unread.changed(trajectory.changes)
        return [
            ConvertedRow(
                id=made.id,
                source=made.source,
                images=made.images,
                attempts=made.attempts,
                scores=made.scores,
                conversations=how.system + made.conversations,
                raw_row=number,
                score_field_differs=trajectory.score_field_differs,
            )
            for made in training_rows(identity, trajectory, how.settings)
        ]

    return rows_of


FORM = RawForm(
    kinds=("fire",),
    row="FIRE's trajectories: a question on a picture, attempts to answer it, and feedback with a score",
    content=RawRow,
    rows=make_rows,
    turns="conversations",
    speakers={"student": "gpt", "teacher": "human"},
    meanings=TRAINED,
    settings=("ignore_keys", "form", "max_history_rounds", "min_score", "single_turn", "thoughts", "feedback_form"),
    fixed=True,
    feedback=("fire",),
    gold=read_gold,
)
