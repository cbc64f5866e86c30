"""What keeps an evaluated row from being told is named, with its file and the next step."""

import json
from pathlib import Path

import pytest

from tracked_run import RUN, tracked_run
from vlmflow.core.errors import VlmflowError
from vlmflow.track.send import row_traces


def traces(folder: Path) -> list:
    return row_traces(
        folder / "eval" / RUN / "val",
        folder / "answers" / RUN / "val",
        folder / "data" / "fire" / "val.jsonl",
        [folder / "images" / "fire" / "train.jsonl"],
        9.0,
    )


def test_all_spans_have_the_given_time(tmp_path: Path) -> None:
    assert {trace.at for trace in traces(tracked_run(tmp_path))} == {9.0}


def test_a_missing_file_of_rows_is_named(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    (folder / "data" / "fire" / "val.jsonl").unlink()
    with pytest.raises(VlmflowError, match=r"data/fire/val\.jsonl: is missing") as caught:
        traces(folder)
    assert "snakemake … -- data/fire/val.jsonl" in caught.value.next_step


@pytest.mark.parametrize("stage", ["eval", "answers"])
def test_a_missing_file_of_results_is_named(tmp_path: Path, stage: str) -> None:
    folder = tracked_run(tmp_path)
    (folder / stage / RUN / "val" / "rows.jsonl").unlink()
    with pytest.raises(VlmflowError, match=rf"{stage}/{RUN}/val/rows\.jsonl: is missing") as caught:
        traces(folder)
    assert caught.value.next_step == f"remove {folder / stage / RUN / 'val'}, and make it again"


@pytest.mark.parametrize(("stage", "there", "counted"), [("eval", 1, 3), ("answers", 0, 1)])
def test_rows_that_were_lost_are_not_left_out_silently(tmp_path: Path, stage: str, there: int, counted: int) -> None:
    folder = tracked_run(tmp_path)
    file = folder / stage / RUN / "val" / "rows.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:there]))
    with pytest.raises(VlmflowError, match=rf"rows\.jsonl: has {there} rows, .* {counted}\n") as caught:
        traces(folder)
    assert caught.value.next_step == f"remove {folder / stage / RUN / 'val'}, and make it again"


def test_a_picture_in_no_manifest_is_named_with_its_row(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    manifest = folder / "images" / "fire" / "train.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": "b.png"}) + "\n")
    with pytest.raises(VlmflowError, match=r"val\.jsonl, row row-0: picture a\.png is in no image manifest") as caught:
        traces(folder)
    assert str(manifest) in caught.value.cause
    assert caught.value.next_step == "check the pictures again: make refresh-pictures DATASET=fire"
