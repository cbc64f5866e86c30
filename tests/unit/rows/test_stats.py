"""`stats.json` on the disk: the keys that stages and people read."""

import json
from pathlib import Path

import msgspec
import pytest

from made_stats import some_stats
from vlmflow.config.data_settings import DatasetSettings, NearDuplicates
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json, write_json
from vlmflow.pictures.manifest import PictureCost, PictureCounts
from vlmflow.rows.stats import RulesUsed, SplitCounts, Stats, rules_used

KEYS = [
    "dataset",
    "kind",
    "modality",
    "skip_images",
    "form",
    "mended",
    "settings",
    "train",
    "examples",
    "kept_by_source",
    "kept_by_attempts",
    "mended_rows",
    "score_field_differs",
    "pictures",
    "unread",
    "digests",
    "raw",
]


def test_keys_are_in_their_order_and_what_there_is_none_of_is_left_out(tmp_path: Path) -> None:
    write_account(tmp_path / "stats.json", some_stats())
    written = read_json(tmp_path / "stats.json")
    assert list(written) == KEYS
    always = RulesUsed.__struct_fields__[: -len(RulesUsed.__struct_defaults__)]
    assert tuple(written["settings"]) == always, "the defaults are those of settings that change nothing"
    assert written["unread"]["train"] == {"unread_keys": {}, "ignored_keys": {}, "unanswered_last_turns": 0}
    write_account(tmp_path / "stats.json", some_stats(test=SplitCounts(0, 0, {})))
    assert list(read_json(tmp_path / "stats.json")) == [*KEYS[:8], "test", *KEYS[8:]]


@pytest.mark.parametrize("drop", [False, True])
def test_the_settings_of_a_data_set_are_written_although_they_are_defaults(drop: bool) -> None:
    settings = DatasetSettings(kind="fire", train="raw.json", near_duplicates=NearDuplicates(drop=drop))
    written = json.loads(msgspec.json.encode(rules_used(settings)))
    nulls = {"min_score", "single_turn"} | (set() if drop else {"near_duplicates"})
    assert written.keys() == {*RulesUsed.__struct_fields__} - nulls
    assert (written["thoughts"], written["max_history_rounds"], written["val_share"]) == ("keep", 6, 0.02)


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({}, {"named": 0, "usable": 0, **{key: {} for key in PictureCounts.__struct_fields__[2:]}}),
        ({"skip_images": True}, {}),
        ({"modality": "text"}, {}),
    ],
)
def test_pictures_that_nobody_checked_are_not_none_named(
    tmp_path: Path, settings: dict[str, object], written: dict[str, object]
) -> None:
    write_account(tmp_path / "stats.json", some_stats(**settings))
    assert read_json(tmp_path / "stats.json")["pictures"] == {"train": written}


@pytest.mark.parametrize("modality", ["image", "text"])
def test_an_account_that_is_read_and_written_again_has_the_same_bytes(tmp_path: Path, modality: str) -> None:
    """As provenance.json repeats it."""
    counts = {"JPEG": 1}, {"cmyk": 1}, {"missing": PictureCost(1, 3)}, {"gqa": PictureCost(1, 3)}, {"letter case": 1}
    pictures = PictureCounts(2, 1, *counts)
    stats = some_stats(modality=modality, test=SplitCounts(2, 1, {"duplicate": 1}), pictures={"train": pictures})
    write_account(tmp_path / "stats.json", stats)
    read = read_account(tmp_path / "stats.json", Stats)
    assert read == stats
    write_account(tmp_path / "again.json", read)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "stats.json").read_bytes()


def test_rows_in_are_kept_rejected_and_left_out() -> None:
    counts = SplitCounts(15, 9, {"duplicate": 1, "not_sampled": 5})
    assert counts.went == (15, 9, 1, 5)
    assert counts.rejects == {"duplicate": 1}
    assert counts.rows_left_out == {"not_sampled": 5}


def test_an_account_of_another_version_is_refused_with_its_field(tmp_path: Path) -> None:
    write_account(tmp_path / "stats.json", some_stats())
    stats = json.loads((tmp_path / "stats.json").read_text())
    del stats["train"]["kept"]
    write_json(tmp_path / "stats.json", stats)
    with pytest.raises(VlmflowError, match=r"stats\.json: train\.kept is missing"):
        read_account(tmp_path / "stats.json", Stats)
