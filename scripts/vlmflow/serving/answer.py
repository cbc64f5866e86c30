"""What a model said, from a server or from this process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A model's answer. cut: it had not ended after the allowed tokens."""

    text: str
    cut: bool
