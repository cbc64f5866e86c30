"""What the command lines of tools have in common."""

from pathlib import Path

import pytest

from vlmflow.config.model import errors_in_words, settings_of, tool_parser
from vlmflow.core.errors import VlmflowError


def test_an_error_ends_with_its_cause_and_next_step() -> None:
    with pytest.raises(SystemExit) as ended, errors_in_words():
        raise VlmflowError("rows.jsonl\x1b: row 3: broken", "fix it")
    assert ended.value.code == "rows.jsonl�: row 3: broken\n  what to do: fix it"


@pytest.mark.parametrize("code", [130, 0])
def test_ctrl_c_ends_without_a_traceback(code: int) -> None:
    with pytest.raises(SystemExit) as ended, errors_in_words(*([] if code else [0])):
        raise KeyboardInterrupt
    assert ended.value.code == code


def test_a_bug_keeps_its_traceback() -> None:
    """The errors of huggingface_hub are of this kind."""
    with pytest.raises(OSError, match="odd"), errors_in_words():
        raise OSError("odd")


def test_a_later_file_takes_precedence(tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(f"stores: {{runs: {name}}}\n")
    given = tool_parser("What it does.", run="merged").parse_args(["--run", "a", "--configfile", *map(str, files)])
    assert settings_of(given.configfile).stores.runs == "second"
    assert (given.run, given.directory) == ("a", Path())
