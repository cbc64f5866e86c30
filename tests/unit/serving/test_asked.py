"""What `make try` asks about a row."""

from pathlib import Path

import msgspec
import pytest

from made_accounts import some_fitted
from training_rows import made_row
from vlmflow.core.account import write_account
from vlmflow.lengths.summary import ACCOUNT
from vlmflow.rows.chat import Turn
from vlmflow.rows.sharegpt import as_line
from vlmflow.serving.asked import asked_in_val

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
