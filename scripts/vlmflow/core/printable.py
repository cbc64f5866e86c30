"""Texts from outside, and counts, for terminals and pages."""


def printable(text: str) -> str:
    """Return a text with � for each character that cannot be printed: a terminal might obey it."""
    return "".join(character if character.isprintable() else "�" for character in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` gives it."""
    return "\n".join(map(printable, text.splitlines()))


def counted(number: int, unit: str) -> str:
    """Return a number with its unit, which is given in the singular: 1 row, 2 processes, 1,234 pictures."""
    many = f"{unit}es" if unit.endswith(("s", "ch")) else f"{unit}s"
    return f"{number:,} {unit if number == 1 else many}"
