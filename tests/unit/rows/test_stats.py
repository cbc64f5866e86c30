"""What people read of a data set: `stats.json`, and the advice if too many rows are rejected."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_stats
from made_rows import form_rows, split_rules
from vlmflow.config.data_settings import DatasetSettings, NearDuplicates
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json, write_json
from vlmflow.pictures.manifest import PictureCost, PictureCounts
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.row_check import advice
from vlmflow.rows.stats import RulesUsed, SplitCounts, Stats, rules_used
from vlmflow.rows.validate import SplitFiles, validate

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


TEXT = {"prompt": "q", "completion": "a", "source": "beta"}
PICTURE = TEXT | {"image": "alpha/1.jpg", "source": "alpha"}
BROKEN = '{"prompt": 1'


def refusal(folder: Path, rows: list[Any], *more: list[Any], **settings: Any) -> str:
    """Convert and validate rows, one file per list, as a data set with the folder's name; return the error."""
    raw = []
    for number, content in enumerate([rows, *more]):
        raw.append(folder / f"rows-{number}.jsonl")
        raw[-1].write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in content))
    dataset = DatasetSettings(kind="prompt_completion", train=list(map(str, raw)), max_reject_share=0.1, **settings)
    files = SplitFiles("train", raw, folder / "good", folder / "bad")
    make = form_rows(dataset.kind, dataset.modality, {}, None, None)
    with open_rows(raw, "train") as opened:
        convert(opened, files.converted, files.rejects, "train", make, dataset.choice("train"), 1)
    rules = split_rules(0.1, 1, dataset.max_reject_share, modality=dataset.modality)
    (folder / "mine").mkdir()
    with pytest.raises(VlmflowError) as error:
        validate([files], folder / "mine", rules, 1)
    return str(error.value)


@pytest.mark.parametrize(
    ("rows", "settings", "advice"),
    [
        ([TEXT] * 40 + [BROKEN] * 2, {"modality": "image"}, "remove datasets.mine.modality; if a picture is under"),
        ([TEXT | {"label": False}] * 4, {"take": True}, "remove datasets.mine.take: no row has a label"),
        ([PICTURE] * 40, {"modality": "text"}, "remove datasets.mine.modality, and set datasets.mine.image_roots"),
        (
            [TEXT] * 30 + [TEXT | {"source": "gamma"}] * 9,
            {"modality": "text", "sources": ["nosuch"]},
            "name sources that the rows have, beta (30), gamma (9), or remove this key: datasets.mine.sources",
        ),
        (
            [TEXT | {"source": f"s{n:02}"} for n in range(12)],
            {"modality": "text", "sources": ["nosuch"]},
            "s09 (1) and 2 more, or remove",
        ),
        ([{"input": "q", "output": "a"}] * 44 + [BROKEN], {"modality": "text"}, "datasets.mine.kind; or map its keys"),
        (
            [TEXT | {"completion": f"a <think>Hm {n}</think>"} for n in range(40)],
            {"modality": "text"},
            "take the marks out of the texts: reasoning (<think>…</think>) is read at the beginning of answers only",
        ),
        ([{"input": "q"}] * 40 + [TEXT] * 3, {"modality": "text", "max_samples": 30}, "keys: datasets.mine.kind"),
    ],
)
def test_the_advice_is_about_the_main_reason(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], advice: str
) -> None:
    said = refusal(tmp_path, rows, **settings)
    assert advice in said
    assert "max_reject_share:" not in said.partition("what to do")[2]


def test_paths_that_lead_out_of_every_root_are_not_mended_by_another_root(tmp_path: Path) -> None:
    lost = Counter({"picture_path_outside": 40})
    said = advice(lost, 40, Counter(), tmp_path / "mine" / "quarantine.jsonl", none_left=True)
    assert said.startswith("name pictures relative to a folder of datasets.mine.image_roots: an absolute path outside")


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("alternation", "take a greeting of gpt before the first question out of the rows"),
        ("special_token", "take the marks out of the texts"),
    ],
)
def test_rows_that_no_setting_takes_have_their_advice(tmp_path: Path, reason: str, step: str) -> None:
    said = advice(Counter({reason: 4}), 40, Counter(), tmp_path / "mine" / "quarantine.jsonl", none_left=True)
    assert step in said
    assert "no setting" in said


def test_single_rows_should_be_fixed(tmp_path: Path) -> None:
    sound = [TEXT | {"prompt": f"q{n}"} for n in range(20)]
    said = refusal(tmp_path, [*sound, BROKEN, *sound[:9], *[{"prompt": "x"}] * 4], modality="text")
    part = tmp_path / "mine" / "quarantine.jsonl.part"
    assert (
        f"look at {part}; fix the rows in a copy of it (datasets.mine.fixed_rows), or, if their pictures are the "
        "reason, datasets.mine.image_roots, or allow more rejects (datasets.mine.max_reject_share)" in said
    )
    assert "rows are counted from 0, lines from 1" in said


def test_a_row_and_a_byte_can_be_found_in_the_file(tmp_path: Path) -> None:
    """By line and byte of the file itself, including blank lines."""
    said = refusal(tmp_path, [TEXT, TEXT], ["", TEXT, '{"prompt": x}', "[", BROKEN], modality="text")
    content = (tmp_path / "rows-1.jsonl").read_bytes()
    start = content.index(b'{"prompt": x}')
    assert f"bad_json: row 3 (rows-1.jsonl, line 3, byte {start}): JSON is malformed: invalid character " in said
    assert f"(byte {content.index(b'x')} of the file)" in said
    assert f"row 4 (rows-1.jsonl, line 4, byte {content.index(b'[')})" in said
