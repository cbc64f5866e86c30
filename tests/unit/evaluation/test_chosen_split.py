"""A split whose files do not fit together is refused before a model is loaded."""

from pathlib import Path

import msgspec
import pytest

from made_cases import row
from made_stats import some_stats
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import RawRows, choose_from_split


def test_a_picture_in_no_manifest_is_named(tmp_path: Path) -> None:
    rows, stats, manifest = tmp_path / "val.jsonl", tmp_path / "stats.json", tmp_path / "train.jsonl"
    rows.write_bytes(msgspec.json.encode(row(1, "c1", images=["gqa/1.jpg"])) + b"\n")
    manifest.write_text("")
    write_account(stats, some_stats(digests={"val.jsonl": sha256_of(rows)}))
    with pytest.raises(VlmflowError, match=r"1 pictures are in no image manifest .*train.jsonl\): gqa/1.jpg"):
        choose_from_split(
            rows, stats, tmp_path, [manifest], RawRows(), feedback=True, count=1, key="k", seed=1, part=None
        )
