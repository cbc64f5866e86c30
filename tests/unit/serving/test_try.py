"""`vlmflow try`: the run that it takes, what it asks about a row, and two answers on a terminal."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from finished_runs import RUN, finished_run
from made_accounts import some_fitted
from made_rows import made_row
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.summary import ACCOUNT
from vlmflow.rows.chat import Turn
from vlmflow.rows.sharegpt import as_line
from vlmflow.serving.asked import asked_in_val, show
from vlmflow.serving.client import Answer
from vlmflow.serving.finished_run import published


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a.part"])
def test_what_is_no_name_is_no_run(tmp_path: Path, name: str) -> None:
    finished_run(tmp_path)
    with pytest.raises(VlmflowError, match="no name of a run"):
        published(tmp_path, name)
    assert published(tmp_path, RUN).is_dir()


TURNS = [Turn("human", "Is <image> red?"), Turn("gpt", "No."), Turn("human", "Look again."), Turn("gpt", "Yes.")]


@pytest.mark.parametrize(("tag", "feedback"), [("", "Look again."), (" <image>", None)])
def test_a_row_is_asked_with_its_tools_and_the_pictures_of_its_question(
    tmp_path: Path, tag: str, feedback: str | None
) -> None:
    """A later turn with a picture is no feedback: a model would be asked about a picture that it does not see."""
    turns = [Turn(turn.speaker, turn.value + tag * (number == 2)) for number, turn in enumerate(TURNS)]
    row = msgspec.structs.replace(made_row("r", turns, images=["1.png", "2.png"][: 1 + bool(tag)]), tools="[]")
    (tmp_path / "val.jsonl").write_bytes(as_line(row, row.images) + b"\n")
    write_account(tmp_path / ACCOUNT, some_fitted())
    asked = asked_in_val(tmp_path, tmp_path / "pictures")
    assert (asked.turns, asked.pictures) == (turns[:1], [tmp_path / "pictures" / "fire" / "1.png"])
    assert (asked.tools, asked.feedback) == ("[]", feedback)


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
