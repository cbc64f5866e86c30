"""Rows with feedback, and scorers whose behaviour is known, for tests of the evaluation."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from training_rows import made_row
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.report import Loss
from vlmflow.rows.chat import FIRST_LINE, Turn
from vlmflow.rows.sharegpt import ShareGptRow

ROWS = 120


def row(number: int, code: str, *, source: str = "codes", score: float = 3, images: Sequence[str] = ()) -> ShareGptRow:
    """Return a row whose feedback holds the right answer, `code`."""
    turns = [
        Turn("human", f"{FIRST_LINE * len(images)}What is the code of door {number}?"),
        Turn("gpt", "Answer: none"),
        Turn("human", f"Score: {score:g}. It is {code}."),
        Turn("gpt", f"Thought: I see.\nAnswer: {code}"),
    ]
    return made_row(f"val-{number:07}-aa", turns, source, list(images), [score, 10])


def rows(count: int = ROWS) -> list[ShareGptRow]:
    """Return rows with codes that differ between neighbours."""
    return [row(number, f"c{number % 7}") for number in range(count)]


Judge = Callable[[str, str, int], float]
"""Takes the last feedback of a conversation ("" without one), the scored answer and a number that varies between rows;
returns the loss per token."""


def scorer(judge: Judge) -> Callable[[Sequence[Work]], Mapping[str, Measured]]:
    """Return a model that loses what `judge` says for each pass, over five tokens."""

    def measure(work: Sequence[Work]) -> dict[str, Measured]:
        found = {}
        for number, each in enumerate(work):
            losses = {
                name: Loss(5 * judge(_feedback(made.turns), made.turns[-1].value, number), 5)
                for name, made in each.passes.items()
            }
            inputs = {name: _digest([made.turns, made.images]) for name, made in each.passes.items()}
            answers = {name: _digest(made.turns[-1:]) for name, made in each.passes.items()}
            found[each.key] = Measured(each.key, losses, inputs, answers, 9)
        return found

    return measure


def _feedback(turns: Sequence[Turn]) -> str:
    return turns[-2].value if len(turns) > 2 else ""


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def noise(number: int) -> float:
    """Return a number between -0.05 and 0.05 that looks random."""
    return ((number * 7919) % 101 - 50) / 1000


def unlike(judge: Judge, seed: int) -> Judge:
    """Return a model of the same behaviour that differs a little for each conversation."""
    return lambda feedback, answer, number: (
        judge(feedback, answer, number) + noise(int(_digest([seed, feedback, answer, number])[:6], 16))
    )


def code_in(answer: str) -> str:
    """Return the right code in an answer."""
    return answer.rpartition("Answer: ")[2]


def uses(feedback: str, answer: str, number: int) -> float:
    """Know the code if the feedback says it."""
    return (1.0 if code_in(answer) in feedback else 3.0) + noise(number)


def ignores(feedback: str, answer: str, number: int) -> float:
    """Know nothing, whatever the feedback."""
    return 3.0 + noise(number)


def reacts_to_presence(feedback: str, answer: str, number: int) -> float:
    """Answer better after any feedback."""
    return (2.0 if feedback else 3.0) + noise(number)
