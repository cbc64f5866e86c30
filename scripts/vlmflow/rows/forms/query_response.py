"""Questions with their answers, in the form of ms-swift: {"query": …, "response": …, "history": [[…, …]]}."""

from typing import Protocol

from vlmflow.config.raw_forms import HISTORY, OF_CONVERSATIONS, RawForm
from vlmflow.rows.raw_text import Reading, rounds


class Row(Protocol):
    """A raw row. history: the rounds before, each a question with its answer."""

    query: str
    response: str
    system: str | None
    history: list[tuple[str, str]] | None


def read(raw: Row, prompt: str | None) -> Reading:
    """Return the turns of the rounds before, then the query with its response."""
    return rounds([(raw.query, raw.response)], raw.system, raw.history)


FORM = RawForm(
    kinds=("query_response",),
    row='`{"query": …, "response": …}`; also `system`, and in `history` the rounds before, `[[question, answer], …]`',
    content=Row,
    read=read,
    answer="response",
    meanings=OF_CONVERSATIONS | HISTORY,
)
