"""The mark before an answer: students in FIRE write `Thought: …` and then `Answer: …`."""

import re

MARK = re.compile(r"answer\s{0,3}[:：]", re.IGNORECASE)

EMPHASIS = "*_`"
"""Marks of Markdown that may be around the mark, or around it and the answer."""


def after_mark(text: str) -> str | None:
    """Return the text after the last `Answer:`, which may be empty; None if the text has no mark.

    The word may stand in the thought, too. Emphasis that begins before the mark is removed with it: `**Answer:** 3` and
    `**Answer: 3**` give `3`.
    """
    marks = list(MARK.finditer(text))
    if not marks:
        return None
    before, after = text[: marks[-1].start()], text[marks[-1].end() :].strip()
    if opened := before[len(before.rstrip(EMPHASIS)) :]:
        after = after.removeprefix(opened) if after.startswith(opened) else after.removesuffix(opened)
    return after.strip()
