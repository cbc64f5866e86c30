"""Text that jobs wrote, made safe to show: a log is whatever a job, its data and its libraries put there."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, sets its title, or turns the direction of its text; not tab and line feed."""


def plain(text: str) -> str:
    """Give the text without control characters."""
    return CONTROL.sub("", text)
