"""Near-duplicates between train and test: found, reported, and dropped on request."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawn_pictures import put
from made_rows import digest, fire_row, form_rows, split_files, split_rules, write_array
from vlmflow.config.data_settings import NearDuplicates, RowChoice
from vlmflow.pictures.look_alikes import find_look_alikes, read_hashes
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.near_duplicates import find_near_duplicates
from vlmflow.rows.row_check import normalised
from vlmflow.rows.stats import SplitCounts
from vlmflow.rows.validate import SplitFiles, validate

RULES = split_rules(val_share=0.2, seed=1, max_reject_share=0.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def splits(tmp_path: Path) -> list[SplitFiles]:
    """Make 20 train pictures, of which a/3 and a/4 look like b/1, two test pictures, and a table of hashes."""
    train = [fire_row(f"a/{n}.jpg", f"question {n}") for n in range(20)]
    train += [fire_row("a/3.jpg", " What IS\u00a0it ?\n"), fire_row("a/3.jpg", "another")]
    test = [fire_row("b/1.jpg", "<image>\nwhat is it"), fire_row("b/2.jpg", "what is it?")]
    files = [split_files(tmp_path, "train", train), split_files(tmp_path, "test", test)]
    hashes = {f"a/{n}.jpg": (n + 1) * 0x9E3779B97F4A7C15 % 2**64 for n in range(20)}
    hashes |= {"b/1.jpg": hashes["a/3.jpg"] ^ 0b111, "b/2.jpg": 0xFFFF}
    hashes["a/4.jpg"] = hashes["b/1.jpg"]
    table = [{"sha256": digest(path), "hash": f"{value:016x}"} for path, value in hashes.items()]
    put(tmp_path / "hashes.jsonl", b"".join(json.dumps(entry).encode() + b"\n" for entry in table))
    return files


def finder(folder: Path, distance: int) -> Any:
    return partial(find_look_alikes, read_hashes([folder / "hashes.jsonl"]), distance=distance)


def find(folder: Path, splits: list[SplitFiles], distance: int) -> list[dict[str, Any]]:
    pairs = folder / "pairs.jsonl"
    manifests = [split.pictures for split in splits]
    test_rows = folder / "out" / "test.jsonl"
    found = find_near_duplicates(splits[0].converted, test_rows, manifests, [folder / "hashes.jsonl"], distance, pairs)
    assert found.pictures + found.rows == len(lines(pairs))
    return lines(pairs)


@pytest.mark.parametrize(
    ("distance", "expected"), [(4, ["a/3.jpg", "a/4.jpg"]), (3, ["a/3.jpg", "a/4.jpg"]), (2, ["a/4.jpg"])]
)
def test_pairs_are_found_whether_their_rows_are_dropped_or_not(
    tmp_path: Path, splits: list[SplitFiles], distance: int, expected: list[str]
) -> None:
    validate(splits, tmp_path / "out", RULES, 1)
    kept = {name: (tmp_path / "out" / f"{name}.jsonl").read_bytes() for name in ("train", "val", "test")}
    pairs = find(tmp_path, splits, distance)
    assert [pair["train"] for pair in pairs] == expected
    assert {pair["test"] for pair in pairs} == {"b/1.jpg"}
    if distance == 4:
        near = {"distance": 3, "rows": 3, "same_questions": 1, "question": "what is it"}
        assert pairs[0] == {"kind": "picture", "train": "a/3.jpg", "test": "b/1.jpg", **near}
        assert pairs[1]["question"] is None
    stats = validate(splits, tmp_path / "out", RULES, 1, find_look_alikes=finder(tmp_path, distance))
    rows = sum(pair["rows"] for pair in pairs)
    assert stats.train == SplitCounts(22, 22 - rows, {"near_test_picture": rows})
    left = [row for name in ("train", "val") for row in lines(tmp_path / "out" / f"{name}.jsonl")]
    assert not {row["images"][0] for row in left} & set(expected)
    assert find(tmp_path, splits, distance) == pairs
    rejected = lines(tmp_path / "out" / "quarantine.jsonl")[0]
    assert f"of 64 bits from the test split's picture with sha256 {digest('b/1.jpg')}" in rejected["detail"]
    validate(splits, tmp_path / "out", RULES, 1)
    assert {name: (tmp_path / "out" / f"{name}.jsonl").read_bytes() for name in kept} == kept


@pytest.mark.parametrize("facts", [{"raw_row": 0, "score_field_differs": False}, {}], ids=["converted", "mixed"])
def test_rows_without_a_picture_are_compared_by_their_questions(tmp_path: Path, facts: dict[str, Any]) -> None:
    def row(name: str, *turns: str) -> dict[str, Any]:
        speakers = ["human", "gpt"] * 2 if len(turns) % 2 == 0 else ["system", "human", "gpt"]
        talk = [{"from": speaker, "value": value} for speaker, value in zip(speakers, turns, strict=False)]
        whole = {"id": name, "source": "s", "images": [], "attempts": [1] * (len(turns) // 2), "scores": []}
        return whole | {"conversations": talk}

    for name, rows in {
        "train": [
            row("t1", "Who are you?", "x"),
            row("t2", "Be kind.", "WHO ARE  YOU", "y"),
            row("t3", "Who is he?", "z"),
            row("e1", "who are you", "w"),  # the test row itself, if test was drawn from train
        ],
        "test": [row("e1", "who are you", "w")],
    }.items():
        own = facts if name == "train" else {}
        put(tmp_path / f"{name}.jsonl", b"".join(json.dumps(one | own).encode() + b"\n" for one in rows))
    put(tmp_path / "none.jsonl", b"")
    pairs = tmp_path / "pairs.jsonl"
    find_near_duplicates(tmp_path / "train.jsonl", tmp_path / "test.jsonl", [], [], 4, pairs)
    assert [(pair["kind"], pair["train"], pair["test"]) for pair in lines(pairs)] == [
        ("question", "t1", "e1"),
        ("question", "t2", "e1"),
    ]
    find_near_duplicates(tmp_path / "train.jsonl", tmp_path / "test.jsonl", [], [], 4, pairs, one_prompt=True)
    assert lines(pairs) == []


def text_files(folder: Path, split: str, kind: str, rows: list[dict[str, str]]) -> SplitFiles:
    raw = write_array(folder / "raw" / f"{split}.json", rows)
    files = SplitFiles(split, [raw], folder / f"{split}.jsonl", folder / f"{split}.rejects.jsonl")
    make = form_rows(kind, "text", {}, "Go on." if kind == "text" else None, None)
    with open_rows([raw], split) as raw_rows:
        convert(raw_rows, files.converted, files.rejects, split, make, RowChoice(), processes=1)
    return files


ASKED = [
    "Who are you?",
    "who ARE you",
    "Who  are you!",
    "?",
    "!",
    "Why?",
    "Ｗhy",
    *(f"question {n}" for n in range(20)),
]


@pytest.mark.parametrize(
    ("kind", "test", "reported"),
    [
        ("alpaca", ["who are you", "why", "!?"], [0, 2, 5, 6]),  # 1 is in test verbatim
        ("alpaca", None, None),
        ("text", ["WHO ARE YOU", "?"], [0, 1, 2]),
    ],
)
def test_near_questions_that_are_reported_are_dropped_and_no_others(
    tmp_path: Path, kind: str, test: list[str] | None, reported: list[int] | None
) -> None:
    """A question of only punctuation is like no other; a question and those like it are never on both sides."""

    def made(split: str, asked: list[str]) -> SplitFiles:
        rows = [{"text": text} if kind == "text" else {"instruction": text, "output": "x"} for text in asked]
        return text_files(tmp_path, split, kind, rows)

    asked = [text.replace("who ARE you", "who are you") for text in ASKED] if kind == "alpaca" else ASKED
    splits = [made("train", asked), *([made("test", test)] if test else [])]
    rules = RULES.model_copy(update={"modality": "text", "kind": kind, "test_share": 0 if test else 0.4})
    out, pairs = tmp_path / "out", tmp_path / "pairs.jsonl"
    stats = validate(splits, out, rules, 1)
    assert "near_test_question" not in stats.train.rejected
    kept = (out / "test.jsonl").read_bytes()
    find_near_duplicates(splits[0].converted, out / "test.jsonl", [], [], 4, pairs, rules.one_prompt)
    named = {pair["train"] for pair in lines(pairs)}
    stats = validate(splits, out, rules.model_copy(update={"near_duplicates": NearDuplicates(drop=True)}), 1)
    ids = [row["id"] for row in lines(splits[0].converted)]
    dropped = [row["row"] for row in lines(out / "quarantine.jsonl") if row["reason"] == "near_test_question"]
    assert {ids[number] for number in dropped} == named
    assert dropped == reported or reported is None
    assert dropped
    assert stats.train.rejected["near_test_question"] == len(dropped)
    assert (out / "test.jsonl").read_bytes() == kept
    assert not named & {row["id"] for name in ("train", "val", "test") for row in lines(out / f"{name}.jsonl")}


def test_a_test_split_taken_from_train_has_near_duplicates_too(tmp_path: Path, splits: list[SplitFiles]) -> None:
    """A picture and those that look like it are never both in test and in train or val."""
    rules = RULES.model_copy(update={"test_share": 0.3})
    train = splits[:1]
    values = {digest(f"a/{n}.jpg"): 0xFF << 8 * (n // 3) for n in range(20)}  # seven different pictures
    table = [{"sha256": name, "hash": f"{value:016x}"} for name, value in values.items()]
    put(tmp_path / "hashes.jsonl", b"".join(json.dumps(entry).encode() + b"\n" for entry in table))
    stats = validate(train, tmp_path / "out", rules, 1, find_look_alikes=finder(tmp_path, 4))
    looks = {
        name: {values[digest(row["images"][0])] for row in lines(tmp_path / "out" / f"{name}.jsonl")}
        for name in ("train", "val", "test")
    }
    assert looks["test"]
    assert not looks["test"] & (looks["train"] | looks["val"])
    assert stats.train.rejected["near_test_picture"] == sum(pair["rows"] for pair in find(tmp_path, train, 4))
    assert stats.train.kept == sum(stats.examples.values())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("<image>\nWhat is it?", "what  is it", True),
        ("Ｗｈａｔ is it?!", "What is it.", True),
        ("Straße", "STRASSE", True),
        ("2 + 2", "2 - 2", False),
        ("Is it 1.5?", "Is it 15?", False),
        ("?", "!", False),
        ("?", " ？", True),
    ],
)
def test_questions_are_compared_without_case_space_and_final_marks(one: str, other: str, same: bool) -> None:
    assert (normalised(one) == normalised(other)) == same
