"""Training rows, of which a test says what it is about."""

from collections.abc import Sequence

from vlmflow.rows.chat import Turn, times_answered
from vlmflow.rows.sharegpt import ShareGptRow


def made_row(
    name: str, turns: Sequence[Turn], source: str = "source", images: Sequence[str] = (), scores: Sequence[float] = ()
) -> ShareGptRow:
    """Return a row whose attempts are numbered from 1. name: its id."""
    attempts = list(range(1, times_answered(turns) + 1))
    return ShareGptRow(name, source, list(images), attempts, list(scores), list(turns))
