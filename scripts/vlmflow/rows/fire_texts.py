"""Changes the texts of FIRE's trajectories as a data set wants them: answers without thoughts, feedback as a sentence.

Both rules are those of https://github.com/Kkuntal990/vlm-self-reflection-ms-swift (scripts/prepare_fire_sharegpt.py,
commit 179cae2). Two things differ. It takes what follows the first `Answer:`, here it is the last one, because the
word may stand in the thought. It drops a score that is written as `5/10`, which stays here.
"""

import re

from msgspec import structs

from vlmflow.rows.answer_mark import after_mark
from vlmflow.rows.rejects import Reject
from vlmflow.rows.trajectories import SCORE, Attempt, Trajectory

SENTENCE = "A score of {} is given to the answer. {}"

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
    said = FEEDBACK.match(after)
    if before.strip("*_# \n") or said is None or not (words := after[said.end() :].strip()):
        return None
    return SENTENCE.format(attempt.score, words)
