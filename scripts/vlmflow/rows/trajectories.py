"""The right answers that raw rows have beside their turns; training rows do not have them.

Trajectories: attempts at a question, each with feedback and a score; and the training rows made from them.

There are millions of these objects, and they have no reference cycles, so the garbage collector does not track them
(gc=False), which halves the time.

Changes the texts of FIRE's trajectories as a data set wants them: answers without thoughts, feedback as a sentence.

Both rules are those of https://github.com/Kkuntal990/vlm-self-reflection-ms-swift (scripts/prepare_fire_sharegpt.py,
commit 179cae2). Two things differ. It takes what follows the first `Answer:`, here it is the last one, because the
word may stand in the thought. It drops a score that is written as `5/10`, which stays here.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from vlmflow.config.settings import GOOD, PartOf
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import FIRST_LINE, Reject, Turn, after_mark
from vlmflow.rows.raw_text import SINGLE_TURN, row_id
from vlmflow.rows.sharegpt import ShareGptRow

if TYPE_CHECKING:  # it loads the forms, which load this module
    from vlmflow.config.data_settings import DatasetSettings

ID = re.compile(rf"((train|val|test)-(\d+)-[0-9a-f]{{8}})(?:-a\d+|{SINGLE_TURN})?")
"""An id of `row_id`, and in the timestep form the attempt, or SINGLE_TURN."""


def gold_answers(
    ids: Iterable[str],
    raw: Mapping[str, Sequence[Path]],
    fixed_rows: Sequence[Path],
    gold: Callable[[bytes], str | None],
) -> dict[str, str]:
    """Return the right answers of training rows by their ids; rows without one are left out.

    raw: the raw files by split. fixed_rows: files of edited rows. gold: see `RawForm`.

    Raises VlmflowError if the raw row is another one than that from which the training row was made.
    """
    wanted: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for identity in ids:
        if match := ID.fullmatch(identity):
            wanted[match[2]].append((int(match[3]), match[1], identity))
    answers = {}
    for split, rows in wanted.items():
        if not raw.get(split):
            continue
        with open_rows(raw[split], split, fixed_rows) as raw_rows:
            for number, expected, identity in rows:
                row = raw_rows[number] if number < len(raw_rows) else b""
                if row_id(split, number, row) != expected:
                    raise VlmflowError(
                        f"{raw_rows}: row {number} is not the one from which row {identity} was made",
                        "the raw file has changed: remove the data set's folders in converted/ and data/, and run the "
                        "same command again",
                    )
                if (answer := gold(row)) is not None:
                    answers[identity] = answer
    return answers


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


def is_trained(trajectory: Trajectory, min_score: int | None) -> bool:
    """Return whether any attempt is trained: all are, or those with at least this score."""
    return min_score is None or any(attempt.score >= min_score for attempt in trajectory.attempts)


def training_rows(identity: str, trajectory: Trajectory, settings: "PartOf[DatasetSettings]") -> list[ShareGptRow]:
    """Return the rows of a trajectory that `is_trained`. identity: the id of the raw row."""
    if settings.form == "timestep":
        rows = timestep_rows(identity, trajectory, settings.max_history_rounds, settings.min_score)
    else:
        rows = [trajectory_row(identity, trajectory, settings.min_score)]
    return rows if settings.single_turn is None else rows + _single_turn(identity, trajectory, settings)


def _single_turn(identity: str, trajectory: Trajectory, settings: "PartOf[DatasetSettings]") -> list[ShareGptRow]:
    """Return the row of the last good attempt; none if no attempt is good, or the first is it.

    The first attempt is trained without feedback in any case: a second row would train it twice.
    """
    least = GOOD if settings.min_score is None else settings.min_score
    good = [number for number, attempt in enumerate(trajectory.attempts, start=1) if attempt.score >= least]
    if not good or good[-1] == 1:
        return []
    row = _row(identity + SINGLE_TURN, trajectory, good[-1] - 1, good[-1])
    if settings.form == "trajectory" and settings.min_score is not None:  # as in the data set's other rows
        row.conversations[-1].loss = True
    return [row]


def read_score(feedback: str) -> int | None:
    """Return the score in a feedback's text, 0 to 10; None if there is none, or if it is larger or not out of 10."""
    match = SCORE.search(feedback)
    if match is None:
        return None
    score, of = match.groups()
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


SENTENCE = "A score of {} is given to the answer. {}"

SENTENCE_BEGINS = re.compile(SENTENCE.format(r"\d+", "").replace(".", r"\."))

FEEDBACK = re.compile(r"[\s.*_]{0,8}Feedback[\s*_]{0,3}:[*_]{0,3}", re.IGNORECASE)
"""What stands between a score and the teacher's words."""


def without_thoughts(trajectory: Trajectory) -> tuple[Trajectory, bool] | Reject:
    """Return a trajectory with the part after `Answer:` of every attempt; a Reject if nothing follows in one.

    Also returns whether an attempt has no `Answer:`: it stays whole.
    """
    answers = [after_mark(attempt.answer) for attempt in trajectory.attempts]
    if "" in answers:
        turn = 2 * answers.index("")
        return Reject("empty_turn", f"conversations[{turn}].value has nothing after `Answer:` (thoughts: drop)")
    attempts = [
        structs.replace(attempt, answer=attempt.answer if answer is None else answer)
        for attempt, answer in zip(trajectory.attempts, answers, strict=True)
    ]
    return structs.replace(trajectory, attempts=attempts), None in answers


def with_sentences(trajectory: Trajectory) -> tuple[Trajectory, bool]:
    """Return a trajectory whose feedback has its score in a sentence.

    Also returns whether feedback before the last attempt has another form than `Score: 5.` and `Feedback: …`: it stays
    as it is. The feedback on the last attempt is in no training row.
    """
    sentences = [_sentence(attempt) for attempt in trajectory.attempts]
    attempts = [
        structs.replace(attempt, feedback=attempt.feedback if sentence is None else sentence)
        for attempt, sentence in zip(trajectory.attempts, sentences, strict=True)
    ]
    return structs.replace(trajectory, attempts=attempts), None in sentences[:-1]


def _sentence(attempt: Attempt) -> str | None:
    """Return the feedback with its score in a sentence; None if that would lose a word of it."""
    score = SCORE.search(attempt.feedback)
    assert score is not None, "the attempt's score was read from it"
    before, after = attempt.feedback[: score.start()], attempt.feedback[score.end() :]
    match = FEEDBACK.match(after)
    if before.strip("*_# \n") or match is None or not (words := after[match.end() :].strip()):
        return None
    return SENTENCE.format(attempt.score, words)


def parted_feedback(feedback: str) -> tuple[str, str]:
    """Return the beginning of a feedback that gives the score, `Score: 5.` with `Feedback:` or SENTENCE, and its words.

    The beginning is "" where a feedback has no such form.
    """
    match = SENTENCE_BEGINS.match(feedback)
    if match is None and (score := SCORE.search(feedback)) and not feedback[: score.start()].strip("*_# \n"):
        match = FEEDBACK.match(feedback, score.end())
    if match is None:
        return "", feedback
    words = feedback[match.end() :].lstrip()
    return feedback.removesuffix(words), words
