import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from made_rows import digest, fire_row, form_rows, split_files, split_rules, training_form
from vlmflow.config.data_settings import DatasetSettings, RowChoice
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows import row_check
from vlmflow.rows.convert import convert, training_line
from vlmflow.rows.stats import SplitCounts
from vlmflow.rows.validate import SplitFiles, validate

RULES = split_rules(val_share=0.2, seed=1, max_reject_share=0.5)


def picture(number: int) -> str:
    return f"gqa/images/{number}.jpg"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(
    folder: Path,
    train: list[Any],
    test: list[Any],
    rules: DatasetSettings = RULES,
    form: str = "trajectory",
    **more: Any,
):
    splits = [
        split_files(folder / "in", "train", train, form, **more),
        split_files(folder / "in", "test", test, form),
    ]
    return validate(splits, folder / "out", rules, processes=1)


def some_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [fire_row(picture(number), f"question {number}") for number in range(first, first + count)]


TEST = some_rows(3, first=900)


def test_rows_in_are_rows_kept_and_rejects_by_reason(tmp_path: Path) -> None:
    """Every raw row is counted once, and every reject is in the quarantine with its place and its content."""
    train = [*some_rows(10), b'{"bad": NaN}', fire_row(picture(50)), fire_row(picture(51), conversations=[])]
    stats = run(tmp_path, train, TEST, pictures={picture(50): {"reason": "missing", "detail": "nowhere"}})
    rejected = {"bad_json": 1, "picture_missing": 1, "unbalanced_turns": 1}
    assert stats.train == SplitCounts(13, 10, rejected)
    assert stats.test == SplitCounts(3, 3, {})
    assert stats.examples["train"] + stats.examples["val"] == 10
    assert stats.examples["test"] == 3
    quarantined = {row["row"]: row for row in lines(tmp_path / "out" / "quarantine.jsonl")}
    assert sorted(quarantined) == [10, 11, 12]
    raw = (tmp_path / "in" / "raw" / "train.json").read_bytes()
    for number, row in quarantined.items():
        assert row["split"] == "train"
        assert raw[row["start"] : row["end"]] == (train[10] if number == 10 else json.dumps(train[number]).encode())
    assert quarantined[10]["raw"] == '{"bad": NaN}'
    assert quarantined[12]["raw"] == train[12]
    assert "nowhere" in quarantined[11]["detail"]


def test_long_details_of_a_row_are_cut(tmp_path: Path) -> None:
    """A path of megabytes would be in the quarantine twice, and on the data page."""
    long = "x" * 1_000_000
    train = [*some_rows(9), fire_row(long)]
    run(tmp_path, train, TEST, pictures={long: {"reason": "path_invalid", "detail": "longer than 500 bytes"}})
    (row,) = lines(tmp_path / "out" / "quarantine.jsonl")
    assert row["detail"].startswith("xxx")
    assert row["detail"].endswith("x: longer than 500 bytes")
    assert len(row["detail"]) == 303


def test_no_picture_of_the_test_split_is_trained_on(tmp_path: Path) -> None:
    """The same bytes under another name: the train row is rejected, but does not count as a fault."""
    train = [*some_rows(5), fire_row("coco/copy.jpg", "another question")]
    stats = run(
        tmp_path,
        train,
        TEST,
        split_rules(0.2, 1, 0.0),
        pictures={"coco/copy.jpg": {"sha256": digest(picture(900))}},
    )
    assert stats.train.rejected == {"in_test_split": 1}
    assert stats.train.kept == 5


def test_no_picture_of_a_raw_validation_split_is_trained_on(tmp_path: Path) -> None:
    """Nothing is drawn for val, and its rows have no picture of the test split either."""
    val = [*some_rows(4, first=500), TEST[0]]
    train = [*some_rows(10), fire_row(picture(500), "another question")]
    rows = {"train": train, "val": val, "test": TEST}
    splits = [split_files(tmp_path / "in", name, made) for name, made in rows.items()]
    stats = validate(splits, tmp_path / "out", RULES, processes=1)
    assert stats.splits == {
        "train": SplitCounts(11, 10, {"in_val_split": 1}),
        "val": SplitCounts(5, 4, {"in_test_split": 1}),
        "test": SplitCounts(3, 3, {}),
    }
    assert stats.examples == {"train": 10, "val": 4, "test": 3}
    of_val = {row["images"][0] for row in lines(tmp_path / "out" / "val.jsonl")}
    assert of_val == {picture(number) for number in range(500, 504)}
    assert not of_val & {row["images"][0] for row in lines(tmp_path / "out" / "train.jsonl")}
    rejected = {row["split"]: row["detail"] for row in lines(tmp_path / "out" / "quarantine.jsonl")}
    assert rejected == {
        "val": "gqa/images/900.jpg is a picture of the test split",
        "train": "gqa/images/500.jpg is a picture of the validation split",
    }


@pytest.mark.parametrize("seed", range(4))
def test_what_a_raw_validation_split_has_is_not_drawn_for_test(tmp_path: Path, seed: int) -> None:
    """Else a picture would be in val and in test."""
    val = some_rows(6)
    train = [fire_row(picture(number), f"another question {number}") for number in range(12)]
    splits = [split_files(tmp_path / "in", name, made) for name, made in (("train", train), ("val", val))]
    stats = validate(splits, tmp_path / "out", RULES.model_copy(update={"test_share": 0.3, "seed": seed}), processes=1)
    assert stats.train == SplitCounts(12, 6, {"in_val_split": 6})
    pictures = [{row["images"][0] for row in lines(tmp_path / "out" / f"{x}.jsonl")} for x in ("train", "val", "test")]
    assert len(set.union(*pictures)) == sum(map(len, pictures)) == 12
    assert pictures[1] == {picture(number) for number in range(6)}


def test_a_raw_validation_split_whose_rows_are_all_in_test_is_an_error(tmp_path: Path) -> None:
    rows = {"train": some_rows(10), "val": TEST, "test": TEST}
    splits = [split_files(tmp_path / "in", name, made) for name, made in rows.items()]
    with pytest.raises(VlmflowError, match=r"val\.json: none of the 3 rows is left"):
        validate(splits, tmp_path / "out", RULES, processes=1)


@pytest.mark.parametrize("test_share", [0.0, 0.2])
def test_a_picture_that_all_rows_share_is_named(tmp_path: Path, test_share: float) -> None:
    splits = [split_files(tmp_path / "in", "train", [fire_row(picture(1), f"question {n}") for n in range(9)])]
    with pytest.raises(VlmflowError, match=r"train\.jsonl: all usable rows share the picture gqa/images/1\.jpg\n.*val"):
        validate(splits, tmp_path / "out", RULES.model_copy(update={"test_share": test_share}), processes=1)


def test_a_split_of_more_than_twice_its_share_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And a split that would be empty says how many rows belong with another one."""
    rows = [fire_row(picture(1 + n // 9), f"question {n}") for n in range(18)]
    rules = RULES.model_copy(update={"test_share": 0.0})
    validate([split_files(tmp_path / "in", "train", rows)], tmp_path / "out", rules, processes=1)
    assert "val has 9 of 18 rows, more than twice its share (20.0%)" in caplog.text
    splits = [split_files(tmp_path / "of", split, held) for split, held in (("train", rows[:10]), ("test", rows[:9]))]
    with pytest.raises(VlmflowError, match=r"of 1 row; 9 more have what test or val has"):
        validate(splits, tmp_path / "out", rules.model_copy(update={"max_reject_share": 1.0}), processes=1)


def test_rows_without_a_good_attempt_are_left_out_and_counted(tmp_path: Path) -> None:
    """They are in no file, and no fault: even a limit of no rejects holds."""
    poor = [fire_row(picture(number), f"question {number}", rounds=5) for number in range(20, 23)]
    for row in poor:
        row["conversations"] = row["conversations"][:-2]  # the scores are 2, 3, 4 and 5
    form = training_form("trajectory", min_score=8)
    splits = [split_files(tmp_path, "train", [*some_rows(5), *poor], form)]
    stats = validate(splits, tmp_path, split_rules(0.2, 1, 0.0), processes=1)
    assert stats.train == SplitCounts(8, 5, {"no_good_attempt": 3})
    assert (tmp_path / "quarantine.jsonl").read_bytes() == b""
    assert stats.kept_by_attempts == {"train": {2: 5}}
    with pytest.raises(VlmflowError, match="none of the 3 rows is left") as refused:
        validate([split_files(tmp_path / "none", "train", poor, form)], tmp_path, RULES, processes=1)
    assert "min_score: no attempt of these rows has that score" in refused.value.next_step


def test_a_row_without_feedback_stays_with_its_trajectory(tmp_path: Path) -> None:
    """In its split, right after it. Two trajectories with the same last answer are no duplicates; a repeated one is."""
    train = some_rows(30)
    train += [fire_row(picture(number), f"question {number}", rounds=3) for number in range(30)]
    for row in train[30:]:
        row["conversations"][-2]["value"] = "Thought: t2.\nAnswer: a2"  # the last answer of the first 30
    form = training_form("trajectory", min_score=8, single_turn="last_good")
    files = split_files(tmp_path, "train", [*train, train[0]], form)
    stats = validate([files], tmp_path / "out", split_rules(0.2, 1, 0.5), processes=1)
    assert stats.train == SplitCounts(61, 60, {"duplicate": 1})
    assert stats.kept_by_attempts == {"train": {2: 30, 3: 30}}
    assert sum(stats.examples.values()) == 120
    for split in ("train", "val"):
        ids = [row["id"] for row in lines(tmp_path / "out" / f"{split}.jsonl")]
        assert ids[1::2] == [f"{identity}-single" for identity in ids[::2]]
        assert ids


def test_duplicates_are_dropped(tmp_path: Path) -> None:
    """The same picture bytes and the same canonical conversation; white space and tags make no difference."""
    again = fire_row("other/name.jpg", "<image>question 0 \r\n")
    stats = run(
        tmp_path,
        [*some_rows(5), again, fire_row(picture(0), "another question")],
        TEST,
        split_rules(0.2, 1, 0.0),
        pictures={"other/name.jpg": {"sha256": digest(picture(0))}},
    )
    assert stats.train.rejected == {"duplicate": 1}
    assert stats.train.kept == 6


def test_val_is_taken_by_picture(tmp_path: Path) -> None:
    """No picture is in both; the same seed gives the same split, another seed another one."""
    train = [fire_row(picture(number), f"q{turn}") for turn in range(3) for number in range(40)]
    held_out = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, train, TEST, split_rules(0.2, seed, 0.0))
        parts = {
            split: {row["images"][0] for row in lines(tmp_path / name / "out" / f"{split}.jsonl")}
            for split in ("train", "val", "test")
        }
        assert not parts["train"] & parts["val"]
        assert len(parts["val"]) == 8
        held_out.append(parts["val"])
    assert held_out[0] == held_out[1] != held_out[2]


def test_one_unusable_attempt_rejects_all_rows_of_the_trajectory(tmp_path: Path) -> None:
    """In the timestep form, if the last answer contains a tag, the examples of the first attempts are rejected too."""
    bad = fire_row(picture(7), rounds=3)
    bad["conversations"][4]["value"] = "Answer: <image>"
    stats = run(tmp_path, [*some_rows(5), bad], TEST, form="timestep")
    assert stats.train == SplitCounts(6, 5, {"stray_tag": 1})
    assert stats.examples["train"] + stats.examples["val"] == 10
    assert all(row["images"] != [picture(7)] for row in lines(tmp_path / "out" / "train.jsonl"))


def test_too_many_rejects_stop_the_workflow(tmp_path: Path) -> None:
    """The error says how many, why and where; it leaves the quarantine, but no data file."""
    train = [*some_rows(3), *[fire_row(picture(60 + n), conversations=[]) for n in range(4)]]
    with pytest.raises(
        VlmflowError,
        match=r"4 of 7 rows were rejected \(57.1%, .*\); max_reject_share allows 50.0%",
    ) as e:
        run(tmp_path, train, TEST)
    assert "unbalanced_turns: row 3" in str(e.value)
    assert f"look at {tmp_path / 'out' / 'quarantine.jsonl.part'};" in str(e.value)
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert all(name.endswith(".part") for name in left)
    assert len(lines(tmp_path / "out" / "quarantine.jsonl.part")) == 4


@pytest.mark.parametrize("empty", ["train", "test"])
def test_zero_kept_rows_is_an_error(tmp_path: Path, empty: str) -> None:
    """A whole file without a usable row."""
    rows = {"train": some_rows(3), "test": TEST} | {empty: [fire_row(conversations=[])]}
    with pytest.raises(VlmflowError, match="none of the 1 rows is left"):
        run(tmp_path, rows["train"], rows["test"], split_rules(0.2, 1, 1.0))


def test_converted_files_of_another_raw_file_are_noticed(tmp_path: Path) -> None:
    files = [split_files(tmp_path, "train", some_rows(9)), split_files(tmp_path, "test", TEST)]
    (raw,) = files[0].raw
    raw.write_bytes(raw.read_bytes()[:-2] + b',{"more": 1}]')
    with pytest.raises(VlmflowError, match="10 rows in, 9 kept, 0 rejected: the counts do not add up"):
        validate(files, tmp_path / "out", RULES, 1)


def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmflow.rows.row_check.SHARD_BYTES", 2_000)
    files = [split_files(tmp_path, "train", some_rows(200)), split_files(tmp_path, "test", TEST)]
    for processes in (1, 3):
        validate(files, tmp_path / str(processes), RULES, processes)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes()


def test_the_score_field_that_differs_is_counted_and_kept(tmp_path: Path) -> None:
    stats = run(tmp_path, [*some_rows(5), fire_row(picture(8), score=[0, 1])], TEST)
    assert stats.score_field_differs == {"train": 1, "test": 0}
    assert stats.train.kept == 6


def test_a_picture_with_its_own_name_gets_the_same_line_faster() -> None:
    """Converted lines are copied if the picture keeps its name; encoded again if it does not, or in another order."""
    fields = {"id": "train-0", "source": "s", "images": ["a.jpg"], "attempts": [1], "scores": [5]}
    turns = [{"from": "human", "value": '<image>\nWhat? ,"raw_row":7,'}, {"from": "gpt", "value": 'x\n"y"'}]
    own = {"raw_row": 3, "score_field_differs": False}
    usual = msgspec.json.encode({**fields, "conversations": turns, **own})
    other = msgspec.json.encode({**own, **fields, "conversations": turns})
    expected = msgspec.json.encode({**fields, "conversations": turns}) + b"\n"
    row = row_check.ROW.decode(usual)
    assert training_line(usual, row, ["a.jpg"]) == expected
    assert training_line(other, row, ["a.jpg"]) == expected
    assert training_line(usual, row, ["a.rgb.png"]) == expected.replace(b"a.jpg", b"a.rgb.png")


def text_files(folder: Path, prompts: list[str], answers: list[str]) -> SplitFiles:
    """Convert rows of a prompt and a completion, without pictures."""
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    return converted_files(folder, "train", rows)


def converted_files(folder: Path, split: str, rows: list[dict[str, Any]]) -> SplitFiles:
    """Convert rows of a prompt and a completion."""
    raw = folder / f"{split}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = SplitFiles(split, [raw], folder / f"{split}.converted", folder / f"{split}.rejects")
    make = form_rows("prompt_completion", None, {}, None, "Be brief.")
    with open_rows([raw], split) as opened:
        convert(opened, files.converted, files.rejects, split, make, RowChoice(), processes=1)
    return files


def about(*pictures: str, answer: str = "It.") -> dict[str, Any]:
    """Return a row about these pictures."""
    return {"prompt": "What?", "completion": answer, "images": list(pictures)}


MIXED = split_rules(0.2, 1, 1.0, test_share=0.2, modality=None)


def test_a_picture_that_all_rows_have_beside_others_is_named(tmp_path: Path) -> None:
    rows = [about(*sorted(["logo", f"{number}"])) for number in range(9)]
    with pytest.raises(VlmflowError, match=r"all usable rows share the picture logo\n.*val"):
        validate([converted_files(tmp_path / "in", "train", rows)], tmp_path / "out", MIXED, 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("raw", [["train"], ["train", "test"], ["train", "val"], ["train", "val", "test"]])
def test_no_picture_is_in_two_splits(tmp_path: Path, seed: int, raw: list[str]) -> None:
    """Rows of one to three of 240 pictures: what is left of train shares none with test or val, and all rows count."""
    rng = Random(seed)
    rows = [
        about(*rng.choices([f"{n}.png" for n in range(240)], k=rng.randint(1, 3)), answer=f"{n}") for n in range(90)
    ]
    parts = [rows[number :: len(raw)] for number in range(len(raw))]
    files = [converted_files(tmp_path / "in", split, part) for split, part in zip(raw, parts, strict=True)]
    stats = validate(files, tmp_path / "out", MIXED.model_copy(update={"seed": seed}), processes=1)
    shown = {
        split: {name for row in lines(tmp_path / "out" / f"{split}.jsonl") for name in row["images"]}
        for split in ("train", "val", "test")
    }
    assert all(shown.values())
    assert not shown["train"] & shown["test"] | shown["train"] & shown["val"] | shown["val"] & shown["test"]
    assert sum(counts.rows_in for counts in stats.splits.values()) == 90
    assert all(counts.kept + sum(counts.rejected.values()) == counts.rows_in for counts in stats.splits.values())


def test_rows_with_the_same_set_of_pictures_are_one_group(tmp_path: Path) -> None:
    """Whatever the order, which tells duplicates apart."""
    rows = [about(*pair, answer="It.") for n in range(20) for pair in ([f"{n}a", f"{n}b"], [f"{n}b", f"{n}a"])]
    stats = validate([converted_files(tmp_path / "in", "train", [*rows, rows[0]])], tmp_path / "out", MIXED, 1)
    assert stats.train.rejected == {"duplicate": 1}
    for split in ("train", "val", "test"):
        sets = Counter(frozenset(row["images"]) for row in lines(tmp_path / "out" / f"{split}.jsonl"))
        assert set(sets.values()) == {2}


def test_a_row_that_shares_one_of_its_pictures_says_which(tmp_path: Path) -> None:
    rows = {"train": [about("a", "b"), about("c", "d"), about("e")], "val": [about("d")], "test": [about("x", "b")]}
    files = [converted_files(tmp_path / "in", split, held) for split, held in rows.items()]
    validate(files, tmp_path / "out", MIXED, 1)
    rejected = [(row["reason"], row["detail"]) for row in lines(tmp_path / "out" / "quarantine.jsonl")]
    assert rejected == [
        ("in_test_split", "b is a picture of the test split"),
        ("in_val_split", "d is a picture of the validation split"),
    ]


def test_rows_without_pictures_are_split_by_prompt(tmp_path: Path) -> None:
    """Rows with the same prompt stay together; test is drawn before val, and the same seed draws the same."""
    prompts = [f"question {number % 50}" for number in range(200)]
    files = text_files(tmp_path / "in", prompts, [f"answer {number}" for number in range(200)])
    held_out = []
    for name, seed, val_share in (("a", 1, 0.1), ("b", 1, 0.2), ("c", 2, 0.1)):
        rules = split_rules(val_share, seed, 0.0, test_share=0.2, modality="text")
        stats = validate([files], tmp_path / name, rules, 1)
        parts = {
            split: {row["conversations"][1]["value"] for row in lines(tmp_path / name / f"{split}.jsonl")}
            for split in ("train", "val", "test")
        }
        assert not parts["train"] & parts["val"] | parts["train"] & parts["test"] | parts["val"] & parts["test"]
        assert len(parts["test"]) == 10
        assert len(parts["val"]) == 40 * val_share
        assert sum(stats.examples.values()) == stats.train.kept == 200
        held_out.append(parts["test"])
    assert held_out[0] == held_out[1] != held_out[2]


@pytest.mark.parametrize("modality", ["text", "image"])
def test_held_out_rows_are_drawn_from_usable_rows(
    tmp_path: Path, modality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth row is rejected: with any seed test and val have a row, also if several workers share one."""
    monkeypatch.setattr("vlmflow.rows.row_check.SHARD_BYTES", 500)
    if modality == "text":
        answers = ["<|im_end|>" if number % 5 == 0 else "fine" for number in range(30)]
        files = text_files(tmp_path / "in", [f"question {number}" for number in range(30)], answers)
    else:
        train = some_rows(30)
        for number in range(0, 30, 5):  # the last of two attempts; the first alone would be usable
            train[number]["conversations"][2]["value"] = "<|im_end|>"
        files = split_files(tmp_path / "in", "train", train, "timestep")
    for seed in range(12):
        rules = split_rules(0.02, seed, 0.5, test_share=0.02, modality=modality)
        stats = validate([files], tmp_path / str(seed), rules, 1 + seed % 2)
        assert stats.train.kept == 24
        assert len({row["id"][:13] for row in lines(tmp_path / str(seed) / "test.jsonl")}) == 1
        assert len({row["id"][:13] for row in lines(tmp_path / str(seed) / "val.jsonl")}) == 1


def test_if_all_prompts_are_equal_the_answer_decides(tmp_path: Path) -> None:
    """Otherwise all rows of kind text would be one group."""
    files = text_files(tmp_path / "in", ["Say something."] * 40, [f"answer {number % 39}" for number in range(40)])
    rules = split_rules(0.1, 1, 0.0, test_share=0.1, modality="text")
    with pytest.raises(VlmflowError, match=r"all usable rows share one prompt"):
        validate([files], tmp_path / "one", rules, 1)
    stats = validate([files], tmp_path / "out", rules.model_copy(update={"kind": "text"}), 1)
    assert stats.train.rejected == {"duplicate": 1}
    assert min(stats.examples.values()) >= 4


def test_rows_with_and_without_pictures_are_never_in_one_file(tmp_path: Path) -> None:
    """Whatever the converter wrote."""
    files = text_files(tmp_path / "in", ["a", "b"], ["c", "d"])
    with pytest.raises(
        VlmflowError, match=r"schema: row 0 \(line 1, byte 0\): 0 pictures in a data set of modality image"
    ):
        validate([files], tmp_path / "out", RULES, 1)
