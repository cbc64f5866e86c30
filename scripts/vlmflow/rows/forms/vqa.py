"""Questions about a picture, in the columns of the hub's data sets: {"image": …, "question": …, "answer": …}."""

from collections import Counter
from typing import Protocol

from vlmflow.config.raw_forms import HISTORY, OF_CONVERSATIONS, Meaning, RawForm, is_given
from vlmflow.rows.chat import Reject
from vlmflow.rows.raw_text import Reading, question_and_answer

OTHER_ANSWERS = Meaning("another key of answers; `columns: {answer: …}` chooses the one to train on", is_given)
CHOICES = Meaning("the choices that belong to the question", is_given)


class Row(Protocol):
    """A raw row. answer: one text, or those of several people."""

    question: str
    answer: str | list[str]


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return the two turns of a row; of several people's answers the most frequent, and of these the first."""
    answers = [raw.answer] if isinstance(raw.answer, str) else raw.answer
    if not answers:
        return Reject("empty_turn", "answer is an empty list")
    return question_and_answer(raw.question, Counter(answers).most_common(1)[0][0])


FORM = RawForm(
    kinds=("vqa",),
    row='`{"question": …, "answer": …}`; `answer` may be a list, of which the most frequent one is trained',
    content=Row,
    read=read,
    answer="answer",
    meanings=OF_CONVERSATIONS
    | HISTORY
    | dict.fromkeys(("answers", "multiple_choice_answer"), OTHER_ANSWERS)
    | dict.fromkeys(("choices", "options"), CHOICES),
    chosen_by={"answers": "answer", "multiple_choice_answer": "answer"},
)
