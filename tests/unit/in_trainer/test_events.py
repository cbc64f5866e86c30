"""The lines of a progress file."""

from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import End, as_line, read_event, read_events


@pytest.mark.parametrize("damaged", [b"{", b'{"event": "end"}', b"\xff\xfe{}", b"\x00\x00\x00{", b"[" * 100_000])
def test_a_damaged_line_is_named_and_costs_no_training(tmp_path: Path, damaged: bytes) -> None:
    """The advice was to remove the run folder, whose checkpoints are whole."""
    progress = tmp_path / "run" / "progress.jsonl"
    progress.parent.mkdir()
    lines = [as_line(End(step, [])).encode() for step in (1, 2)]
    progress.write_bytes(lines[0] + damaged + b"\n" + lines[1])
    with pytest.raises(VlmflowError, match=r"run/progress\.jsonl, line 2: ") as raised:
        read_events(progress)
    assert raised.value.next_step.startswith(f"remove line 2 of {progress} and run the same command again")
    progress.write_bytes(b"".join(lines))
    assert read_events(progress) == [End(1, []), End(2, [])]


def test_a_line_is_utf_8() -> None:
    """Zeros are a sign of another encoding for json."""
    line = as_line(End(1, [])).encode("utf-16-le")
    with pytest.raises(ValueError, match=r"Expecting|Invalid"):
        read_event(line)
