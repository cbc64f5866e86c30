"""Rows that write the same otherwise: turns as JSON in a text, in two lists, and beside a better and a worse answer."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import converted_rows, example_of_a_form, form_rows
from vlmflow.config.raw_forms import form_of, kinds
from vlmflow.config.settings import RowChoice
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.named import reader
from vlmflow.raw.rewritten import rewriter
from vlmflow.rows.chat import Reject

COLOURS = ["red", "green", "blue", "black", "orange", "purple"]
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]
TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]
ASKED = ["human: What?", "gpt: It."]


@pytest.mark.parametrize(
    ("name", "kind", "take", "turns"),
    [
        ("22-trl-prompt-completion-lists.jsonl", "prompt_completion", None, "human: Colour of {}?"),
        ("22-trl-prompt-completion-lists.jsonl", "messages", None, "human: Colour of {}?"),
        ("26-dpo.json", "sharegpt", "chosen", "human: Colour of {}?"),
        ("27-trl-preference.jsonl", "prompt_completion", "chosen", "human: Colour?"),
        ("27-trl-preference.jsonl", "messages", "chosen", "human: Colour?"),
        ("49-datasets-json-column.parquet", "messages", None, "human: Colour of {}?"),
    ],
)
def test_other_makers_files(tmp_path: Path, name: str, kind: str, take: str | None, turns: str) -> None:
    found = converted_rows(tmp_path, example_of_a_form(name), kind=kind, take=take)
    assert found.talks == [[turns.format(colour), f"gpt: {colour}"] for colour in COLOURS]
    assert found.unread["ignored_keys"] == ({"rejected": 6} if take else {})
    assert found.rejects == {}


def test_of_kto_rows_those_of_good_answers_are_taken(tmp_path: Path) -> None:
    found = converted_rows(tmp_path, example_of_a_form("28-kto.json"), kind="messages", take=True)
    assert found.talks == [[f"human: Colour of {c}?", f"gpt: {c}"] for c in COLOURS[::2]]
    assert found.rejects == dict.fromkeys((1, 3, 5), "not_taken")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("26-dpo.json", "sharegpt", "rejected: 6 of 6 rows"),
        ("27-trl-preference.jsonl", "messages", "rejected: 6 of 6 rows"),
        ("27-trl-preference.jsonl", "prompt_completion", "chosen: 6 of 6 rows"),
        ("28-kto.json", "messages", "label: 3 of 6 rows"),
    ],
)
def test_preference_rows_stop_without_a_choice(tmp_path: Path, name: str, kind: str, said: str) -> None:
    """Whatever else is wrong with them; the message names the choice."""
    with pytest.raises(VlmflowError) as raised:
        converted_rows(tmp_path, example_of_a_form(name), kind=kind)
    assert said in raised.value.cause
    assert ("take: true" if "label" in said else "take: chosen") in raised.value.cause


GOOD, BAD = {"role": "assistant", "content": "It."}, {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("messages", {"messages": CHAT[:1], "chosen": GOOD, "rejected": BAD}),
        ("messages", {"messages": CHAT[:1], "chosen": [GOOD], "rejected": [BAD]}),
        ("messages", {"prompt": "What?", "chosen": CHAT, "rejected": [CHAT[0], BAD], "messages": CHAT}),
        ("messages", {"prompt": "What?", "chosen": CHAT, "rejected": [CHAT[0], BAD]}),
        ("messages", {"messages": json.dumps(CHAT[:1]), "chosen": [GOOD], "rejected": [BAD]}),
        ("messages", {"messages": CHAT, "rejected_response": "No."}),
        ("messages", {"messages": CHAT, "rejected_messages": [CHAT[0], BAD]}),
        ("prompt_completion", {"prompt": "What?", "chosen": "It.", "rejected": "No."}),
        ("alpaca", {"instruction": "What?", "chosen": "It.", "rejected": "No."}),
        ("query_response", {"query": "What?", "response": "It.", "rejected_response": "No."}),
        ("sharegpt", {"conversations": TALK[:1], "chosen": TALK[1], "rejected": TALK[1] | {"value": "No."}}),
    ],
)
def test_the_chosen_answer_is_the_answer(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    found = converted_rows(tmp_path, [row] * 3, kind=kind, take="chosen")
    assert found.talks == [ASKED] * 3
    assert sum(found.unread["ignored_keys"].values()) == 3
    assert "chosen" not in found.unread["unread_keys"]


def test_two_answers_besides_the_worse_one_stop(tmp_path: Path) -> None:
    row = {"query": "What?", "response": "It.", "chosen": "It is it.", "rejected": "No."}
    with pytest.raises(VlmflowError, match="chosen: 1 of 1 rows") as raised:
        converted_rows(tmp_path, [row], kind="query_response", take="chosen")
    assert "\n  rejected: " not in raised.value.cause


@pytest.mark.parametrize(
    ("labels", "taken"),
    [
        ({"label": True}, True),
        ({"label": 1}, True),
        ({"label": "True"}, True),
        ({"kto_tag": True}, True),
        ({"label": None, "kto_tag": "1"}, True),
        ({"label": False, "kto_tag": True}, False),
        ({"label": 0}, False),
        ({"label": "good"}, False),
        ({"label": 2}, False),
        ({}, False),
    ],
)
def test_a_label_that_is_not_true_leaves_a_row_out(tmp_path: Path, labels: dict[str, Any], taken: bool) -> None:
    found = converted_rows(tmp_path, [{"messages": CHAT} | labels], kind="messages", take=True)
    assert len(found.rows) == taken
    assert found.rejects == ({} if taken else {0: "not_taken"})


def test_rows_are_drawn_from_those_that_are_taken(tmp_path: Path) -> None:
    """Nor are the pictures of the others asked for."""
    rows = [{"messages": CHAT, "label": n % 3 == 0, "image": f"{n}.png"} for n in range(9)]
    found = converted_rows(tmp_path, rows, kind="messages", take=True, max_samples=2)
    assert len(found.rows) == 2
    assert sorted(found.rejects.values()) == ["not_sampled"] + ["not_taken"] * 6
    assert found.named == [row.images[0] for row in found.rows]


@pytest.mark.parametrize(
    ("kind", "row", "turns"),
    [
        ("messages", {"messages": json.dumps(CHAT)}, ASKED),
        ("messages", {"messages": "\n " + json.dumps(CHAT, indent=1)}, ASKED),
        ("sharegpt", {"conversations": json.dumps(TALK)}, ASKED),
        ("texts", {"texts": json.dumps([{"user": "What?", "assistant": "It."}])}, ASKED),
        ("pairs", {"conversation": json.dumps([{"human": "What?", "assistant": "It."}])}, ASKED),
        ("alpaca", {"instruction": "What?", "output": "It.", "history": ""}, ASKED),
        ("alpaca", {"instruction": "What?", "output": "It.", "history": "[]"}, ASKED),
        (
            "alpaca",
            {"instruction": "[1]", "output": "[2]", "history": '[["a", "b"]]'},
            ["human: a", "gpt: b", "human: [1]", "gpt: [2]"],
        ),
        ("vqa", {"question": "[1]?", "answer": '["It."]'}, ["human: [1]?", 'gpt: ["It."]']),
    ],
)
def test_lists_may_be_json_in_texts(tmp_path: Path, kind: str, row: dict[str, Any], turns: list[str]) -> None:
    """In JSON, in parquet and in CSV alike; what is a text in its form stays one."""
    assert converted_rows(tmp_path, [row] * 2, kind=kind).talks == [turns] * 2
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert converted_rows(tmp_path, tmp_path / "rows.parquet", kind=kind).talks == [turns]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([row.keys(), row.values()])
    assert converted_rows(tmp_path, tmp_path / "rows.csv", kind=kind).talks == [turns]


def test_what_stops_rows_stops_those_in_texts_too(tmp_path: Path) -> None:
    turns = json.dumps([CHAT[0], CHAT[1] | {"weight": 0.5}])
    with pytest.raises(VlmflowError, match=r"messages\.weight: 2 of 2 rows"):
        converted_rows(tmp_path, [{"messages": turns}] * 2, kind="messages")
    with pytest.raises(VlmflowError, match=r"messages\.weight: 1 of 1 rows"):
        converted_rows(tmp_path, [{"prompt": [CHAT[0]], "completion": json.loads(turns)[1:]}], kind="prompt_completion")


@pytest.mark.parametrize("text", ["It.", "[1", "[{'role': 'user'}]", '{"role": "user"}', "", '["\\ud800"]', "[" * 2000])
def test_a_text_that_is_no_json_list_is_rejected(tmp_path: Path, text: str) -> None:
    found = converted_rows(tmp_path, [{"messages": text}], kind="messages")
    assert found.rejects == {0: "bad_shape"}


def test_a_key_given_twice_is_found_before_rows_are_rewritten(tmp_path: Path) -> None:
    raw = tmp_path / "rows.jsonl"
    asked = json.dumps(CHAT[:1])
    twice = f'{{"messages": [], "chosen": {json.dumps(GOOD)}, "messages": {asked}}}\n'
    inner = json.dumps({"messages": '[{"role": "user", "role": "user", "content": "x"}]'})
    raw.write_text(twice + inner)
    found = converted_rows(tmp_path, raw, kind="messages", take="chosen")
    assert found.rejects == dict.fromkeys((0, 1), "duplicate_key")


def test_tables_have_the_columns_of_a_choice(tmp_path: Path) -> None:
    """A column that is missing is still named."""
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": CHAT[:1], "completion": CHAT[1:]}]), table)
    assert converted_rows(tmp_path, table, kind="prompt_completion").talks == [ASKED]
    pq.write_table(pa.Table.from_pylist([{"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [BAD]}]), table)
    assert converted_rows(tmp_path, table, kind="prompt_completion", take="chosen").talks == [ASKED]
    with pytest.raises(VlmflowError, match="no column 'messages'"):
        converted_rows(tmp_path, table, kind="messages")
    pq.write_table(pa.Table.from_pylist([{"instruction": 1, "output": "It."}]), table)
    with pytest.raises(VlmflowError, match="column 'instruction' holds int64, not a text"):
        converted_rows(tmp_path, table, kind="alpaca")


VALUES = st.sampled_from(["", "[", "[1]", '[{"role": "user"}]', "x", "null", None, 1, [], [1], {}, CHAT, CHAT[0], TALK])
HELD = VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "value"]), VALUES)
ROWS = st.dictionaries(
    st.sampled_from(["messages", "conversations", "prompt", "completion", "chosen", "rejected", "history", "output"]),
    HELD,
)


@given(row=ROWS, kind=st.sampled_from([kind for kind in kinds() if form_of(kind).read]), noise=st.binary(max_size=2))
def test_no_row_makes_the_rewriting_raise(row: dict[str, Any], kind: str, noise: bytes) -> None:
    """Nor the search for a kind, nor the reading of pictures, which rewrite a row by the same function."""
    form = form_of(kind)
    for raw in (json.dumps(row).encode(), json.dumps(row).encode()[:20] + noise):
        made = form_rows(kind, None, {}, "p", None, take="chosen")("id", 0, raw)
        assert isinstance(made, list | Reject)
        reader(RowChoice(names=form.names({}), kind=kind, take="chosen"))(raw)
        rewritten = rewriter(form, form.names({}), "chosen")
        once = rewritten(raw)
        assert rewritten(once) is once


WATCHED = {"role": "user", "content": "<video>Then <image>?"}
FRAMES = [f"v/{number}.jpg" for number in range(9)]


@pytest.mark.parametrize(
    ("row", "text", "images"),
    [
        ({"videos": [FRAMES], "images": ["a.jpg"]}, "<image><image><image>Then <image>?", [*FRAMES[::4], "a.jpg"]),
        ({"videos": [FRAMES[:2]], "image": "a.jpg"}, "<image><image>Then <image>?", [*FRAMES[:2], "a.jpg"]),
    ],
)
def test_frames_take_the_place_of_their_video(
    tmp_path: Path, row: dict[str, Any], text: str, images: list[str]
) -> None:
    rows = [{"messages": [WATCHED, {"role": "assistant", "content": "Yes."}]} | row]
    made = converted_rows(tmp_path, rows, kind="messages", frames_as_pictures=3)
    assert made.talks == [[f"human: {text}", "gpt: Yes."]]
    assert made.rows[0].images == images
    assert made.named == list(dict.fromkeys(images))


def test_a_picture_under_both_keys_counts_once_beside_frames(tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "completion": "It.", "image": "a.jpg", "images": ["a.jpg"], "videos": [FRAMES]}]
    made = converted_rows(tmp_path, rows, kind="prompt_completion", frames_as_pictures=1)
    assert made.named == made.rows[0].images == ["a.jpg", FRAMES[0]]


def test_frames_without_a_tag_come_before_the_question(tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "completion": "It.", "videos": [FRAMES]}]
    made = converted_rows(tmp_path, rows, kind="prompt_completion", frames_as_pictures=1)
    assert made.talks == [["human: <image>\nWhat?", "gpt: It."]]
    assert made.named == made.rows[0].images == FRAMES[:1]


@pytest.mark.parametrize("videos", [["v.mp4"], [FRAMES, FRAMES]])
def test_other_videos_stop_as_before(tmp_path: Path, videos: list[Any]) -> None:
    rows = [{"messages": [WATCHED, {"role": "assistant", "content": "Yes."}], "images": ["a.jpg"], "videos": videos}]
    with pytest.raises(VlmflowError, match="videos: 1 of 1 rows"):
        converted_rows(tmp_path, rows, kind="messages", frames_as_pictures=3)
