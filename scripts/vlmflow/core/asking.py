"""Asks the person at the terminal."""


def agrees(question: str) -> bool:
    """Return whether the person answers yes; Enter, Ctrl-C and the end of the input are a no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
