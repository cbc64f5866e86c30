"""Makes dialogues between a student and a teacher about a question, in FIRE's wording and raw form."""

from random import Random
from typing import Any

from vlmflow.demo.sample_questions import Question

Row = dict[str, Any]

DOUBTS = (
    "At first sight it looks like {}.",
    "I’d go for {}.",
    "It seems to be {}.",
    "My first guess is {}.",
    "This points to {}.",
)
INSIGHTS = (
    "Looking again, it must be {}.",
    "I was wrong before, it is {}.",
    "On a closer look it is {}.",
    "The hint helps: {} fits.",
    "Now I see that it is {}.",
)
BLAME = (
    "Your answer is not correct.",
    "This is not right.",
    "The answer {} does not fit the picture.",
    "You looked in the right way, but {} is wrong.",
    "That is a good try, yet {} is not what the picture shows.",
)
BLAME_AGAIN = (
    "You are closer, but {} is still wrong.",
    "Not yet: {} is not the answer.",
    "The thought is better, the answer {} is not right.",
    "Still incorrect.",
)
PRAISE = (
    "Correct! It is {}.",
    "Great job, {} is right.",
    "Well done, you found the right answer.",
    "That’s it, {} is correct now.",
    "Exactly. You used the hint well.",
)
SCORE_FORMS = ("Score: {}.\n",) * 7 + ("Score: {}/10.\n",) * 2 + ("Score: {}. ",)
"""How FIRE's teachers write the score, with similar frequencies: on a separate line, out of ten, or on one line."""

WRONG_SCORES, RIGHT_SCORE = (3, 4), 10
"""The scores of attempts, in their order. All rows of so many rounds have the same, so that the evaluation finds
another row whose feedback could have been its own."""


def raw_row(image: str, source: str, question: Question, rng: Random) -> Row:
    """Make one row of FIRE's raw form: one or two wrong answers with feedback, then the right one.

    image: the picture's path in the row.
    source: the question's source, by FIRE's name.
    """
    wrong = rng.sample(question.wrong, min(len(question.wrong), rng.choice((1, 1, 2))))
    words = [*wrong, question.truth]
    scores = [*WRONG_SCORES[: len(wrong)], RIGHT_SCORE]
    turns = []
    for number, (word, score) in enumerate(zip(words, scores, strict=True)):
        turns.append({"role": "student", "type": "response", "value": _answer(question, word, number, rng)})
        turns.append({"role": "teacher", "type": "feedback", "value": _feedback(question, word, number, score, rng)})
    return {
        "image": image,
        "question": {"role": "user", "value": _asked(rng.choice(question.texts), rng)},
        "conversations": turns,
        "groundtruth": {"role": "user", "value": question.truth},
        "source": source,
        "round": len(words),
        "score": scores,
    }


def _asked(text: str, rng: Random) -> str:
    """Add FIRE's picture tag before or after about one question in five, as FIRE does."""
    return rng.choice((f"<image>\n{text}", f"<image>\n{text}", f"{text}\n<image>") + (text,) * 12)


def _answer(question: Question, word: str, number: int, rng: Random) -> str:
    thought = rng.choice(DOUBTS if number == 0 else INSIGHTS).format(word)
    if rng.random() < 0.7:
        thought = f"{_sentence(rng.choice(question.seen))} {thought}"
    return f"Thought: {thought}\nAnswer: {_sentence(rng.choice(question.answers).format(word))}\n\n"


def _feedback(question: Question, word: str, number: int, score: int, rng: Random) -> str:
    if word == question.truth:
        text = rng.choice(PRAISE).format(word)
    else:
        text = f"{rng.choice(BLAME_AGAIN if number else BLAME).format(word)} {rng.choice(question.hints)}"
    return f"{rng.choice(SCORE_FORMS).format(score)}Feedback: {text}\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."
