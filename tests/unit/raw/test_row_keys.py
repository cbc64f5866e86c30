"""Keys of raw rows: given twice, and those of pictures in any letter case."""

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import fire_row, fire_rows, form_rows, training_form
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.choice import refuse_columns
from vlmflow.raw.rewritten import key_fault, with_own_keys
from vlmflow.raw.split import open_rows
from vlmflow.rows import strict_rows
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import MakeRows, convert

TALK = '"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'
PICTURES = ("image", "images")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ('{"prompt": "q", "completion": "a", "completion": "b"}', "the key 'completion' is given twice"),
        ('{"prompt" : "q", "completion":"a" , "completion"\n:"b"}', "the key 'completion' is given twice"),
        ('{"prompt": "q", "completion": "a", "compl\\u0065tion": "b"}', "the key 'completion' is given twice"),
        ('{"image": "a.jpg", "image": null, "prompt": "q", "completion": "a"}', "the key 'image' is given twice"),
        ('{"prompt": "q", "completion": "a", "note": 1, "note": 2}', "the key 'note' is given twice"),
        ('{"prompt": "q", "completion": "a", "more": {"x": 1, "x": 2}}', "the key 'x' is given twice"),
        ('{"prompt": "q", "completion": "say \\":\\" and : ", "prompt": "q"}', "the key 'prompt' is given twice"),
        ('{"prompt": "q", "completion": "a\\u003a", "prompt": "q"}', "the key 'prompt' is given twice"),
        ('{"prompt": "q", "completion": "a\\u003A \\u003c"}', ""),
        (
            '{"Image": "a", "prompt": "q", "completion": "a", "image": "b"}',
            "'Image' and 'image' differ only in letter case",
        ),
        ('{"prompt": "q", "completion": "say \\":\\" and : "}', ""),
        ('{"prompt": "q", "completion": "a", "more": [{"x": 1}, {"x": ": "}]}', ""),
    ],
)
def test_a_key_given_twice_rejects_its_row(row: str, fault: str) -> None:
    """Whatever stands before it: sound rows of the same keys, of fewer, or of more."""
    sound = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a", "source": "s", "images": []}]
    sound += [{"prompt": "q", "completion": "a", "note": 1}, {"prompt": "q", "completion": "a", "more": {"x": 1}}]
    for before in ([], *([one] * 2 for one in sound)):
        make = form_rows("prompt_completion", "text", {}, None, None)
        for one in before:
            assert not isinstance(make("id", 0, json.dumps(one).encode()), Reject)
        made = make("id", 0, row.encode())
        assert isinstance(made, Reject) == bool(fault)
        if fault:
            assert (made.reason, fault in made.detail) == ("duplicate_key", True)


@pytest.mark.parametrize(
    "row",
    [
        f'{{"system": "be evil", {TALK}, "system": ""}}',
        f'{{{TALK[:-2]}, "weight": 0, "weight": 1}}]}}',
        f'{{{TALK[:-2]}, "content": "b"}}]}}',
        f"{{{TALK}, {TALK}}}",
    ],
)
def test_no_value_of_a_key_in_a_turn_or_row_is_lost(row: str) -> None:
    make = form_rows("messages", "text", {}, None, None)
    for before in (f"{{{TALK}}}", f"{{{TALK}}}", row):
        made = make("id", 0, before.encode())
    assert isinstance(made, Reject)
    assert made.reason == "duplicate_key"


@pytest.mark.parametrize("first", ['"user": "q", "source": "s"', '"user": "q"'])
def test_a_key_of_a_round_that_may_be_missing_hides_no_key_given_twice(first: str) -> None:
    make = form_rows("texts", None, {}, None, None)
    sound, twice = '{"user": "q", "assistant": "a"}', '{"user": "q", "user": "r", "assistant": "a"}'
    assert not isinstance(make("id", 0, f'{{"texts": [{{{first}, "assistant": "a"}}, {sound}]}}'.encode()), Reject)
    made = make("id", 0, f'{{"texts": [{{{first}, "assistant": "a"}}, {twice}]}}'.encode())
    assert made == Reject("duplicate_key", "the key 'user' is given twice")


@pytest.mark.parametrize(
    ("at", "more"),
    [
        ('{"image"', '{"image": "a", "image"'),
        ('"role": "student"', '"role": "teacher", "role": "student"'),
        ('"type": "response"', '"type": "response", "value": "x"'),
        ('"type": "gt"', '"type": "gt", "type": "gt"'),
    ],
)
def test_a_fire_row_with_a_key_twice_is_rejected(at: str, more: str) -> None:
    row = fire_row(rounds=2, groundtruth={"role": "user", "type": "gt", "value": "x"})
    for turn in row["conversations"]:
        turn["type"] = "response"
    sound = json.dumps(row)
    make = fire_rows(training_form("trajectory"), RowLimits())
    for _ in range(2):
        assert not isinstance(make("id", 0, sound.encode()), Reject)
    made = make("id", 0, sound.replace(at, more, 1).encode())
    assert isinstance(made, Reject)
    assert made.reason == "duplicate_key"


VALUES = st.text(st.sampled_from('a":\\{}[],é\n '), max_size=8)


def written(row: dict[str, str], turns: list[dict[str, str]], *, twice: tuple[int, str] | None, colon: str) -> bytes:
    """Return a row of turns as JSON. twice: an object, counted from the row itself, and its key that is given twice."""

    def members(number: int, held: dict[str, str]) -> str:
        pairs = [*held.items(), (twice[1], json.dumps(twice[1]))] if twice and twice[0] == number else held.items()
        return ", ".join(f"{json.dumps(key)}{colon}{value}" for key, value in pairs)

    spoken = ", ".join(f"{{{members(number, turn)}}}" for number, turn in enumerate(turns, start=1))
    return f"{{{members(0, row | {'messages': f'[{spoken}]'})}}}".encode()


@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(["source", "note", "more", "image"]), VALUES | st.none()), max_size=4
    ),
    texts=st.lists(VALUES, min_size=8, max_size=8),
    chosen=st.integers(0, 20),
    ascii_only=st.booleans(),
    colons=st.lists(st.sampled_from([": ", ":", " :", "\n: "]), min_size=4, max_size=4),
)
def test_the_quick_look_misses_no_key_given_twice(
    rows: list[dict[str, Any]], texts: list[str], chosen: int, ascii_only: bool, colons: list[str]
) -> None:
    """On rows of any keys and texts, one after the other; each is sound at first, then has one key twice."""
    make = form_rows("messages", "text", {}, None, None)
    for row, asked, answer, colon in zip(rows, texts[::2], texts[1::2], colons, strict=False):
        own = {key: json.dumps(value, ensure_ascii=ascii_only) for key, value in row.items()}
        spoken = [("user", asked), ("assistant", answer)]
        turns = [
            {"role": f'"{who}"', "content": json.dumps("x" + text, ensure_ascii=ascii_only)} for who, text in spoken
        ]
        sound = make("id", 0, written(own, turns, twice=None, colon=colon))
        assert not isinstance(sound, Reject) or sound.reason in ("has_picture", "bad_picture")
        held = (own, *turns)[number := chosen % 3]
        keys = sorted(held) or ["messages"]
        made = make("id", 0, written(own, turns, twice=(number, keys[chosen % len(keys)]), colon=colon))
        assert isinstance(made, Reject)
        assert made.reason == "duplicate_key"


def sound_rows() -> list[tuple[MakeRows, Callable[[int], dict[str, Any]]]]:
    talk = [{"from": "human", "value": 'What "is" it?\n'}, {"from": "gpt", "value": "Answer: \u00e9"}]
    chat = [{"role": "user", "content": 'What "is" it?'}, {"role": "assistant", "content": "It.", "weight": 1}]
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "a.jpg"}}]

    def tools(number: int) -> dict[str, Any]:
        return {"tools": [{"name": "see", "parameters": {"properties": {}}}]} if number % 2 else {}

    truth = {"groundtruth": {"role": "user", "type": "gt", "value": "x"}, "round": 2}
    return [
        (fire_rows(training_form("trajectory"), RowLimits()), lambda n: fire_row(rounds=1 + n % 3) | truth),
        (
            form_rows("volcano", "image", {}, None, None),
            lambda n: {"id": n, "image": "a", "conversations": talk * (1 + n % 2)},
        ),
        (
            form_rows("alpaca", "text", {}, None, None),
            lambda n: {"instruction": "q", "output": "a"} | {"input": "i"} if n % 2 else {},
        ),
        (
            form_rows("messages", None, {}, None, None),
            lambda n: {"messages": [said | {"content": parts} if n % 3 else said for said in chat]} | tools(n),
        ),
    ]


@pytest.mark.parametrize(("make", "row"), sound_rows())
def test_sound_rows_are_not_searched_for_keys_given_twice(
    make: MakeRows, row: Callable[[int], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes as long as the whole conversion."""
    searched: list[bytes] = []
    monkeypatch.setattr(strict_rows, "key_fault", lambda one: searched.append(one) or "")
    for number in range(50):
        make("id", number, json.dumps(row(number)).encode())
    assert searched == []


def converted(path: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the rows made from a file, and by row number why a row gave none."""
    dataset = DatasetSettings(train=str(path), **settings)
    good, bad = path.with_name("good"), path.with_name("bad")
    make = form_rows(dataset.kind, dataset.modality, dataset.columns, None, None)
    choice = dataset.choice("train")
    with open_rows([path], "train", [], choice.read_columns) as rows:
        refuse_columns(rows, dataset.kind, dataset.modality, dataset.columns)
        convert(rows, good, bad, "train", make, choice, 1)
    made, rejected = ([json.loads(line) for line in file.read_bytes().splitlines()] for file in (good, bad))
    return made, {row["raw_row"]: row["reason"] for row in rejected}


@pytest.mark.parametrize("key", ["image", "Image", "IMAGE", "iMaGe"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_key_of_pictures_counts_in_any_letter_case(tmp_path: Path, key: str, suffix: str) -> None:
    """Rows of texts leave such a row out, and rows with pictures have it."""
    rows = [{"prompt": f"q{n}", "completion": "a", key: f"x/{n}.jpg"} for n in range(4)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "q", "completion": "a"}]))
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0].keys(), *(row.values() for row in rows), ["q", "a", ""]])
    else:
        pq.write_table(pa.Table.from_pylist([*rows, {"prompt": "q", "completion": "a", key: None}]), path)
    texts, reasons = converted(path, kind="prompt_completion", modality="text")
    assert [row["raw_row"] for row in texts] == [4]
    assert reasons == dict.fromkeys(range(4), "has_picture")
    for settings in ({}, {"sources": ["x"]}, {"max_samples": 4}):
        own = {"kind": "prompt_completion", "modality": "image", "image_roots": ["."], **settings}
        pictures, _ = converted(path, **own)
        assert [row["images"] for row in pictures] == [[f"x/{n}.jpg"] for n in range(4)]
        choice = DatasetSettings(train=str(path), **own).choice("train")
        assert list(named_paths([path], "train", choice=choice)) == [f"x/{n}.jpg" for n in range(4)]


def test_a_list_of_pictures_and_a_column_of_another_name_do_too(tmp_path: Path) -> None:
    row = '{"prompt": "q", "completion": "a", "%s": %s}'
    made = form_rows("prompt_completion", "image", {"image": "file"}, None, None)(
        "id", 0, (row % ("File", '"x.jpg"')).encode()
    )
    assert made[0].images == ["x.jpg"]
    made = form_rows("prompt_completion", "image", {}, None, None)("id", 0, (row % ("IMAGES", '["x.jpg"]')).encode())
    assert made[0].images == ["x.jpg"]
    assert with_own_keys(b'{"image": 1}', PICTURES) == b'{"image": 1}'


def test_columns_that_differ_only_in_letter_case_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,image,Image\nq,a,x.jpg,y.jpg\n")
    with pytest.raises(VlmflowError, match="columns 'image' and 'Image' differ only in letter case"):
        converted(path, kind="prompt_completion", modality="text")


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table([["q"], ["a"], ["b"]], names=["prompt", "completion", "completion"]), path)
    with pytest.raises(VlmflowError, match=r"rows\.parquet: has more than one column 'completion'"):
        open_rows([path], "train")


def test_a_meaning_in_a_column_of_another_letter_case_stops(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["q"], "completion": ["a"], "lossWeight": [0]}), path)
    with pytest.raises(VlmflowError, match="loss_weight: 1 of 1 rows"):
        converted(path, kind="prompt_completion", modality="text")


def test_many_keys_of_which_one_is_given_twice_take_no_longer() -> None:
    """A list's count for each key took 47 s here."""
    many = ",".join(f'"k{number}":1' for number in range(60_000))
    began = time.process_time()
    assert key_fault(f'{{{many},"k59999":2}}'.encode()) == "the key 'k59999' is given twice"
    assert time.process_time() - began < 5


def test_a_text_that_looks_like_a_key_in_an_earlier_row_hides_no_key_given_twice() -> None:
    make = form_rows("prompt_completion", "text", {}, None, None)
    for _ in range(2):
        assert not isinstance(make("id", 0, b'{"prompt":"q","completion":"a","more":{"x":": "}}'), Reject)
    made = make("id", 0, b'{"prompt":"q","completion":"a","more":{"x":1,"x":2}}')
    assert isinstance(made, Reject)
    assert made.reason == "duplicate_key"
