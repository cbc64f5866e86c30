"""A split whose files do not fit together is refused before a model is loaded."""

from pathlib import Path

import msgspec
import pytest

from made_cases import row
from made_stats import some_stats
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import ChosenSplit, RawRows, choose_from_split
from vlmflow.rows.halves import Part, group_of, half_of


def test_a_picture_in_no_manifest_is_named(tmp_path: Path) -> None:
    rows, stats, manifest = tmp_path / "val.jsonl", tmp_path / "stats.json", tmp_path / "train.jsonl"
    rows.write_bytes(msgspec.json.encode(row(1, "c1", images=["gqa/1.jpg"])) + b"\n")
    manifest.write_text("")
    write_account(stats, some_stats(digests={"val.jsonl": sha256_of(rows)}))
    with pytest.raises(VlmflowError, match=r"1 pictures are in no image manifest .*train.jsonl\): gqa/1.jpg"):
        choose_from_split(
            rows, stats, tmp_path, [manifest], RawRows(), feedback=True, count=1, key="k", seed=1, part=None
        )


def test_the_halves_of_val_are_evaluated_apart_and_give_each_other_controls(tmp_path: Path) -> None:
    rows, stats = tmp_path / "val.jsonl", tmp_path / "stats.json"
    of_val = [row(number, f"c{number % 7}") for number in range(240)]
    rows.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in of_val))
    write_account(stats, some_stats(kind="alpaca", digests={"val.jsonl": sha256_of(rows)}))

    def chosen(part: Part | None) -> ChosenSplit:
        how = {"feedback": True, "count": 1000, "key": "k", "seed": 1}
        return choose_from_split(rows, stats, tmp_path, [], RawRows(), part=part, **how)

    halves = {part: {each.case.row.id for each in chosen(part).rows} for part in ("chooses", "judges")}
    judges = half_of((group_of(each, {}) for each in of_val), "judges") or frozenset()
    assert halves["judges"] == {each.id for each in of_val if group_of(each, {}) in judges}
    assert halves["chooses"] | halves["judges"] == {each.id for each in of_val}
    assert not halves["chooses"] & halves["judges"]
    assert {each.id: each.reason for each in chosen("judges").out} == dict.fromkeys(halves["chooses"], "other_half")
    controls = {each.donor.row.id for each in chosen("judges").rows if each.donor}
    assert controls & halves["chooses"], "as many rows as possible have a control"
    assert len(chosen(None).rows) == len(of_val)
