"""Two answers on a terminal."""

import io

from rich.console import Console

from vlmflow.serving.asked import show
from vlmflow.serving.client import Answer


def shown(*texts: str, cut: bool = False) -> str:
    out = io.StringIO()
    show(Console(file=out, width=60), ["base", "tuned"], [Answer(text, cut) for text in texts])
    return out.getvalue()


def test_each_model_has_its_column_and_long_answers_wrap() -> None:
    lines = shown("Four.", "word " * 30).splitlines()
    assert any("base" in line[:30] and "tuned" in line[30:] for line in lines)
    assert any("Four." in line[:30] for line in lines)
    assert sum(line[30:].count("word") for line in lines) == 30
    assert max(map(len, lines)) <= 60


def test_no_answer_steers_the_terminal_or_is_read_as_markup() -> None:
    text = shown("\x1b[2J\x07[red]five[/red]\r", "two\nlines")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]five[/red]" in text
    assert "�[2J" in text


def test_an_empty_and_an_unfinished_answer_are_marked() -> None:
    assert "(nothing)" in shown("", "Four.")
    assert shown("Four", "Five", cut=True).count("…") == 2
