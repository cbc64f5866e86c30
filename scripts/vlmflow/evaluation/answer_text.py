"""The answer in a turn's text, as FIRE writes it: "Thought: … Answer: …"; other texts are the answer as a whole."""

import re
import unicodedata

MARK = "Answer:"
NOT_WORD = re.compile(r"[^\w\s.%-]+")


def answer_in(text: str) -> str:
    """Return the text after the last `Answer:`, or all of it without one, or if nothing follows."""
    after = text.rpartition(MARK)[2].strip()
    return after or text.strip()


def normalised(text: str) -> str:
    """Return an answer in the form in which two equal ones are equal: case, marks and spaces do not count."""
    plain = NOT_WORD.sub(" ", unicodedata.normalize("NFKC", answer_in(text)).casefold())
    return " ".join(plain.split()).rstrip(".")
