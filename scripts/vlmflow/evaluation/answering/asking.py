"""Asks a model all questions of a run; answers are kept one by one, so that a kill costs one."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.evaluation.answering.dialogues import Question
from vlmflow.evaluation.answering.models import Ask, Model
from vlmflow.evaluation.kept_lines import KeptLines
from vlmflow.rows.messages import messages_of
from vlmflow.serving.client import picture_part

ASKING = 1
"""The way in which models are asked. Kept answers belong to it: raise it whenever a change of this code, of `models` or
of `vlmflow.serving` may change the answer to the same question."""


class KeptAnswer(msgspec.Struct, frozen=True):
    """A model's answer. key: that of the question. cut: whether it had not ended after the allowed tokens."""

    key: str
    text: str
    cut: bool


def answers_to(
    questions: Sequence[Question], model: Model, pictures: Path, max_tokens: int, store: Path
) -> tuple[dict[str, KeptAnswer], int]:
    """Return a model's answers by the questions' keys, and how many of them were not kept before.

    pictures: the picture store of the rows. max_tokens: of an answer. store: `stores.evaluations`.

    A server is started only if an answer is missing. Its log is removed if all goes well.
    Raises VlmflowError with the row if an answer fails.
    """
    kept = KeptLines(store, "answers", {**model.meaning, "max_tokens": max_tokens, "asking": ASKING}, KeptAnswer)
    known = kept.read()
    missing = list({question.key: question for question in questions if question.key not in known}.values())
    if missing:
        file = kept.new_file()
        log = file.with_suffix(".log")
        with (
            model.asked(log) as ask,
            file.open("ab") as lines,
            Progress(f"answers of {model.name}", len(missing), "answers") as progress,
        ):
            for question in missing:
                answer = _answer(question, ask, pictures, max_tokens)
                lines.write(msgspec.json.encode(answer) + b"\n")
                lines.flush()
                known[answer.key] = answer
                progress.advance()
        log.unlink(missing_ok=True)
    return {question.key: known[question.key] for question in questions}, len(missing)


def _answer(question: Question, ask: Ask, pictures: Path, max_tokens: int) -> KeptAnswer:
    try:
        messages = messages_of(question.turns, [picture_part(pictures / name) for name in question.images])
        answer = ask(messages, max_tokens, question.tools)
    except VlmflowError as error:
        raise type(error)(
            f"row {question.row}, after {question.rounds} rounds: {error.cause}", error.next_step
        ) from None
    return KeptAnswer(question.key, answer.text, answer.cut)
