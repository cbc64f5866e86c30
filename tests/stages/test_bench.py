"""The benchmarks' command lines work with the present scripts."""

import subprocess
import sys
from pathlib import Path

import pytest

from workflow_runs import ROOT

BENCH = ROOT / "tests" / "bench"


@pytest.fixture
def bench_rows(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_rows

    return bench_rows


def test_both_ways_over_rows_run(bench_rows: object, tmp_path: Path) -> None:
    bench_rows.prepare(tmp_path, 60, 2)
    for command in bench_rows.stages(tmp_path, 2).values():
        assert bench_rows.seconds(command)[0] > 0
    limit = bench_rows.limit.command("fire", tmp_path, 2)
    assert bench_rows.seconds(limit)[0] > 0
    plain = [sys.executable, str(BENCH / "bench_rows.py"), "plain_way", str(tmp_path)]
    assert float(subprocess.run(plain, check=True, capture_output=True, text=True).stdout) > 0
    assert (tmp_path / "data/stats.json").is_file()


@pytest.mark.slow
def test_the_starts_that_are_measured_reach_validated_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import bench_starts

    monkeypatch.setattr(bench_starts, "ROUNDS", 1)
    monkeypatch.setattr(bench_starts, "TEST_ROWS", 60)
    for name in ("TRAINER", "PLAIN"):  # they take as long as everything else here
        monkeypatch.setattr(bench_starts, name, "import os")
    figures = bench_starts.bench_starts(tmp_path, 600)
    assert (tmp_path / "run-0/data/fire/stats.json").is_file()
    assert figures["data_processor_seconds"] > figures["plan_processor_seconds"] > 0
