"""How a job of Slurm ended, from its state and its stage's verdict."""

from pathlib import Path

import pytest

from vlmflow.remote.slurm.queue import ended_of, read_verdict


@pytest.mark.parametrize(
    ("state", "how", "again", "taken_away"),
    [
        ("BOOT_FAIL", "lost", True, True),
        ("CANCELLED", "refused", False, False),
        ("CANCELLED by 1000", "refused", False, False),
        ("DEADLINE", "out of time", False, False),
        ("FAILED", "failed", True, False),
        ("NODE_FAIL", "lost", True, True),
        ("OUT_OF_MEMORY", "out of memory", True, False),
        ("PREEMPTED", "preempted", True, True),
        ("REVOKED", "lost", True, True),
        ("TIMEOUT", "out of time", True, False),
        ("A_STATE_OF_TOMORROW", "failed", True, False),
    ],
)
def test_each_state_says_whether_another_attempt_may_help(
    tmp_path: Path, state: str, how: str, again: bool, taken_away: bool
) -> None:
    ended = ended_of(state, tmp_path / "none")
    assert ended is not None
    assert (ended.how, ended.again, ended.taken_away) == (how, again, taken_away)
    assert ended.cause


def test_a_job_that_succeeded_did_so_whatever_its_stage_left(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text('{"again": false}')
    assert ended_of("COMPLETED", tmp_path / "7.json") is None


@pytest.mark.parametrize(
    ("verdict", "again", "cause"),
    [
        ('{"again": false}', False, "its stage failed"),
        ('{"again": false, "why": "it saved nothing"}', False, "it saved nothing"),
        ('{"saved": true}', True, "its stage failed"),
        ('{"again": 0, "why": ""}', True, "its stage failed"),
        ('{"why": "a\\u001b[2Jb\\u202ec"}', True, "a\ufffd[2Jb\ufffdc"),
    ],
)
def test_a_stage_says_itself_whether_it_would_fail_again(tmp_path: Path, verdict: str, again: bool, cause: str) -> None:
    (tmp_path / "7.json").write_text(verdict)
    ended = ended_of("FAILED", tmp_path / "7.json")
    assert ended is not None
    assert (ended.how, ended.again, ended.cause) == ("failed", again, cause)


@pytest.mark.parametrize(
    "verdict",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b'["again", false]',
        b"false",
        b"[" * 900,
        b'{"again": false, "why": "' + b"x" * 10_000_000 + b'"}',
        b'{"again": false}' + b" " * 10_000_000,
    ],
    ids=["empty", "text", "bytes", "list", "word", "deep", "huge", "huge at its end"],
)
def test_a_verdict_that_is_none_says_nothing(tmp_path: Path, verdict: bytes) -> None:
    (tmp_path / "7.json").write_bytes(verdict)
    assert read_verdict(tmp_path / "7.json") == {}
    ended = ended_of("FAILED", tmp_path / "7.json")
    assert ended is not None
    assert ended.again


def test_a_place_that_holds_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) == read_verdict(tmp_path / "none") == {}
