"""Questions about a drawn picture, with the right answer, likely wrong ones, and a teacher's hints.

Makes dialogues between a student and a teacher about a question, in FIRE's wording and raw form.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from vlmflow.demo.sample_scenes import COLOURS, PLACES, SHAPES, BarsScene, Scene, ShapesScene, Thing

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Question:
    """One question about one picture.

    texts: wordings of the question; one of them is used.
    answers: wordings of an answer, with {} for the right or wrong word.
    truth: the right word.
    wrong: plausible wrong words.
    seen: what a student might notice first.
    hints: how a teacher points at the mistake without giving the answer away.
    """

    texts: tuple[str, ...]
    answers: tuple[str, ...]
    truth: str
    wrong: tuple[str, ...]
    seen: tuple[str, ...]
    hints: tuple[str, ...]


def questions_about(scene: Scene) -> list[Question]:
    """Return every possible question about a picture, always in the same order."""
    return list(_about_shapes(scene) if isinstance(scene, ShapesScene) else _about_bars(scene))


def _about_shapes(scene: ShapesScene) -> Iterator[Question]:
    things = scene.things
    for thing in things:
        colour, shape, spot = thing.colour, thing.shape, thing.spot
        around = tuple(_noticed(other) for other in things if other is not thing)
        yield Question(
            texts=(
                f"What colour is the shape at the {spot}?",
                f"Which colour has the {shape} at the {spot}?",
                f"At the {spot} stands a shape. What is its colour?",
            ),
            answers=("The shape is {}.", "It is {}.", f"The {shape} at the {spot} is {{}}."),
            truth=colour,
            wrong=_others(COLOURS, colour),
            seen=(f"one shape stands at the {spot}", f"the {spot} is not empty", *around),
            hints=(
                f"Look at the {spot} again and name the colour that you see there.",
                f"You may have looked at a neighbour of the {shape}.",
                f"Compare the {shape} with the shapes around it.",
            ),
        )
        yield Question(
            texts=(
                f"Which shape is {colour}?",
                f"What is the shape of the {colour} thing?",
                f"Name the {colour} shape in the picture.",
            ),
            answers=("It is a {}.", f"The {colour} shape is a {{}}.", "The shape is a {}."),
            truth=shape,
            wrong=_others(SHAPES, shape),
            seen=(f"something {colour} stands at the {spot}", f"only one shape is {colour}", *around),
            hints=(
                f"Count the corners of the {colour} shape.",
                f"Follow the outline of the shape at the {spot}.",
                "Its edges tell more than its size.",
            ),
        )
        yield Question(
            texts=(
                f"Where is the {colour} {shape}?",
                f"In which part of the picture is the {colour} {shape}?",
                f"Find the {colour} {shape} and say where it stands.",
            ),
            answers=("It is at the {}.", f"The {colour} {shape} is at the {{}}.", "At the {}."),
            truth=spot,
            wrong=_others(PLACES, spot),
            seen=(f"there is just one {colour} shape", f"the {shape} is easy to find", *around),
            hints=(
                "Divide the picture into two rows of three parts and look again.",
                f"Look for the {colour} colour alone, part by part.",
                "Left and right, top and bottom: check both.",
            ),
        )
    for shape, count in Counter(thing.shape for thing in things).items():
        yield Question(
            texts=(
                f"How many {_several(shape)} are there?",
                f"How many {_several(shape)} can you see in the picture?",
                f"Count the {_several(shape)}.",
            ),
            answers=("I count {}.", f"The number of {_several(shape)} is {{}}.", "The number is {}."),
            truth=NUMBERS[count],
            wrong=(NUMBERS[count - 1], NUMBERS[count + 1]),
            seen=(f"the picture holds {NUMBERS[len(things)]} shapes in all", *map(_noticed, things)),
            hints=(
                f"Count every {shape} once, row by row.",
                "Other shapes do not count here.",
                f"Look at each shape and ask whether it is a {shape}.",
            ),
        )


def _about_bars(scene: BarsScene) -> Iterator[Question]:
    bars = scene.bars
    seen = tuple(f"the {colour} bar reaches about {NUMBERS[tenths]} tenths" for colour, tenths in bars)
    by_height = sorted(bars, key=lambda bar: bar[1])
    for word, (colour, _) in (("highest", by_height[-1]), ("lowest", by_height[0])):
        yield Question(
            texts=(
                f"Which bar is the {word}?",
                f"What colour has the {word} bar of the chart?",
                f"Find the {word} bar and name its colour.",
            ),
            answers=(f"The {word} bar is {{}}.", "It is the {} bar.", "The {} one."),
            truth=colour,
            wrong=_others([other for other, _ in bars], colour),
            seen=seen,
            hints=(
                f"Compare the tops of all bars to find the {word} one.",
                "Draw a level line in your mind and see which bars cross it.",
                f"Another bar is still {'higher' if word == 'highest' else 'lower'}.",
            ),
        )
    count = len(bars)
    yield Question(
        texts=("How many bars are there?", "How many bars does the chart have?", "Count the bars."),
        answers=("There are {} bars.", "The chart has {} bars.", "I count {} bars."),
        truth=NUMBERS[count],
        wrong=(NUMBERS[count - 1], NUMBERS[count + 1]),
        seen=seen,
        hints=("Count the bars from left to right.", "A low bar is a bar too.", "Each colour stands for one bar."),
    )
    for (left, height), (right, other) in pairwise(bars):
        truth, wrong = ("yes", "no") if height > other else ("no", "yes")
        yield Question(
            texts=(
                f"Is the {left} bar higher than the {right} bar?",
                f"Does the {left} bar rise above the {right} one?",
                f"Compare {left} and {right}: is {left} higher?",
            ),
            answers=("The answer is {}.", "I would say {}.", "{}"),
            truth=truth,
            wrong=(wrong,),
            seen=(f"the {left} bar stands beside the {right} one", *seen),
            hints=(
                f"Compare the tops of the {left} and the {right} bar.",
                "The two stand side by side, so the step between them is easy to see.",
            ),
        )


def _noticed(thing: Thing) -> str:
    article = "an" if thing.colour[0] in "aeiou" else "a"
    return f"there is {article} {thing.colour} {thing.shape} at the {thing.spot}"


def _several(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def _others(words: Iterable[str], but: str) -> tuple[str, ...]:
    return tuple(word for word in words if word != but)


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
