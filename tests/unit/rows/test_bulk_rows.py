"""Files in FIRE's form for benchmarks: realistic sizes, and every row usable."""

import pytest

from bulk_rows import PICTURE_COUNT, write_fire_rows
from vlmflow.config.data_settings import RowLimits
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows import sharegpt
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.trajectories import Trajectory, trajectory_row

ROWS = 4_000


def test_every_row_is_valid_and_its_picture_exists(tmp_path):
    write_fire_rows(tmp_path / "rows.json", ROWS, seed=1)
    seen = set()
    images = set()
    rounds = 0
    with JsonRows(tmp_path / "rows.json") as rows:
        assert len(rows) == ROWS
        for row in rows:
            trajectory = read_trajectory(row)
            assert isinstance(trajectory, Trajectory), trajectory
            assert not trajectory.score_field_differs
            assert sharegpt.first_fault(trajectory_row("id", trajectory), RowLimits()) is None
            rounds += len(trajectory.attempts)
            images.add(trajectory.image)
            seen.add(row)
    assert len(seen) == ROWS
    assert len(images) == PICTURE_COUNT
    assert all((tmp_path / "pictures" / image).is_file() for image in images)
    assert 2.55 < rounds / ROWS < 2.71
    assert 2_000 < (tmp_path / "rows.json").stat().st_size / ROWS < 2_270


@pytest.mark.lengthy
def test_two_runs_write_the_same_bytes_and_another_seed_others(tmp_path):
    files = [tmp_path / str(number) / "rows.json" for number in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        write_fire_rows(file, 200, seed)
    first, second, third = (file.read_bytes() for file in files)
    assert first == second
    assert first != third
