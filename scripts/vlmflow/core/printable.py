"""Texts from outside, for terminals and pages."""


def printable(text: str) -> str:
    """Return a text with � for each character that cannot be printed: a terminal might obey it."""
    return "".join(character if character.isprintable() else "�" for character in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` gives it."""
    return "\n".join(map(printable, text.splitlines()))
