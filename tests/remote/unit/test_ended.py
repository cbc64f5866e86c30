"""What follows from the way in which a job ended, whoever ran it."""

import atexit
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmflow.remote import job as remote_job
from vlmflow.remote.job import Attempts, Ended, memory_kills
from vlmflow.remote.library import VERDICT


def job(attempt: int = 1) -> SimpleNamespace:
    """What Attempts needs of a job of Snakemake, with two retries."""
    return SimpleNamespace(attempt=attempt, restart_times=2)


@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ("failed", False),
        ("lost", True),
        ("preempted", True),
        ("out of time", False),
        ("out of memory", False),
        ("refused", False),
    ],
)
def test_only_a_job_that_was_taken_away_has_not_failed(how: str, taken: bool) -> None:
    assert Ended(how).taken_away == taken


def test_a_failure_uses_an_attempt_and_one_that_would_repeat_uses_all() -> None:
    attempts, one, other = Attempts(10_000), job(), job()
    assert attempts.after(one, "fit_rows run=a", 400, Ended(cause="it ended with code 1")) == "it ended with code 1"
    assert one.attempt == 1
    said = attempts.after(other, "fit_rows run=a", 400, Ended("refused", "no right to create it", again=False))
    assert said == "no right to create it\nThis job is not retried: it would fail in the same way."
    assert other.attempt == 3
    assert attempts.mem_mb("fit_rows run=a", 400) == 400


def test_one_that_lacked_memory_gets_more_until_the_limit() -> None:
    attempts, killed, words = Attempts(800), Ended("out of memory", "killed"), "convert_rows split=train"
    assert attempts.after(job(1), words, 400, killed) == "killed (400 MB); the next attempt gets 600 MB"
    assert attempts.mem_mb(words, 400) == 600
    assert attempts.mem_mb("convert_rows split=test", 400) == 400
    assert attempts.after(job(2), words, 400, killed) == "killed (600 MB); the next attempt gets 800 MB"
    last = job(2)
    said = attempts.after(last, words, 400, killed)
    assert said.startswith("killed (800 MB); cluster.max_mem_mb allows no more\nThis job is not retried")
    assert last.attempt == 3


def test_the_last_attempt_promises_no_memory() -> None:
    assert Attempts(800).after(job(3), "rule", 400, Ended("out of memory", "killed")) == "killed (400 MB)"


@pytest.mark.parametrize("kills", [0, 1])
def test_a_pod_says_at_its_end_that_it_lacked_memory(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control group, when its container starts again, has the kills of before, too."""
    at_end, verdict, counts = [], tmp_path / "verdict", tmp_path / "memory.events"
    (tmp_path / "own").write_text("0::/\n")
    counts.write_text("oom_kill 2\n")
    monkeypatch.setattr(atexit, "register", at_end.append)
    monkeypatch.setattr(remote_job, "memory_kills", partial(memory_kills, tmp_path / "own", tmp_path))
    monkeypatch.setenv(VERDICT, str(verdict))
    remote_job.say_memory_kills(SimpleNamespace(scheduler=None))
    counts.write_text(f"oom_kill {2 + kills}\n")
    at_end[0]()
    assert verdict.exists() is bool(kills)
