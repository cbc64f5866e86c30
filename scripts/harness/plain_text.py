"""Makes the text of jobs safe to print: a log holds whatever a job, its data and its libraries wrote."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, set its title, or change the text's direction; not tab and line feed."""


def plain(text: str) -> str:
    """Return the text without control characters."""
    return CONTROL.sub("", text)
