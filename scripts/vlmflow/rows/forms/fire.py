"""FIRE's raw form, and the two training forms that are made from it.

The raw form is known from the data set itself (https://huggingface.co/datasets/PengxiangLi/FIRE, arXiv:2407.11522):
student and teacher alternate strictly, and the teacher's text contains the score.

There are millions of these objects, and they have no reference cycles, so the garbage collector does not track them
(gc=False), which halves the time.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from vlmflow.config.key_meanings import TRAINED
from vlmflow.config.raw_forms import RawForm
from vlmflow.raw.named import source_of
from vlmflow.rows.chat import FIRST_LINE, Turn
from vlmflow.rows.raw_text import SINGLE_TURN, clean, cleaned, untagged
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow

SCORE = re.compile(
    r"\bScore[\s*_]{0,3}:[\s*_]{0,3}(\d+)(?:\s*(?:/|out of)\s*(\d+))?(?![\d,–%-]|\.\d|e\d|\s*(?:/|out of))",
    re.IGNORECASE,
)
"""`Score: 5.`, `Score: 5/10.` or `Score: 5 out of 10`; other numbers (5.5, 5-7, 5%) are not scores."""


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


class NamedInRow(Protocol):
    """The keys that stages read to choose rows and find their pictures, and the turns; the conversion reads RawRow."""

    image: str
    source: Any
    conversations: list[RawTurn]


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


FORM = RawForm(
    kinds=("fire",),
    row="FIRE's trajectories: a question on a picture, attempts to answer it, and feedback with a score",
    content=NamedInRow,
    turns="conversations",
    speakers={"student": "gpt", "teacher": "human"},
    meanings=TRAINED,
    settings=("ignore_keys", "form", "max_history_rounds", "min_score", "single_turn", "thoughts", "feedback_form"),
    fixed=True,
    feedback=("fire",),
    gold=read_gold,
)

ROW = msgspec.json.Decoder(RawRow)
NESTED = {"question": RawTurn, "conversations": RawTurn}


def read_trajectory(row: bytes, decode: Callable[[bytes], RawRow] = ROW.decode) -> Trajectory | Reject:
    """Return the content of a raw row, or why the row cannot be used. Raises nothing, whatever the bytes are.

    decode: decodes the row; a stricter decoder than the default may refuse valid rows (`bad_shape` or `bad_json`).
    """
    try:
        raw = decode(row)
    except msgspec.ValidationError as error:
        return Reject("bad_shape", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Reject("bad_json", str(error))
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
