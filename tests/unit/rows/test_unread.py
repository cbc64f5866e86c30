"""Keys that no form reads: those that change what a row means stop the conversion; the others are counted."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import fire_row, fire_rows, form_rows, training_form, write_array
from vlmflow.config.data_settings import DatasetSettings, RowLimits
from vlmflow.config.raw_forms import form_of
from vlmflow.core.account import digests_of
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import Reject
from vlmflow.rows.convert import convert
from vlmflow.rows.raw_messages import CALL_KEYS, LOSS_KEYS
from vlmflow.rows.strict_rows import UnreadKeys
from vlmflow.rows.unread import refuse_unread_texts

TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]
ASK = {"instruction": "What?", "output": "It."}
TOOL = {"name": "clock", "parameters": {"type": "object", "properties": {}}}


def turns(*changes: dict[str, Any], of: str = "messages") -> dict[str, Any]:
    """Return a conversation; the changes apply to its turns, from the last one backwards."""
    talk = [dict(turn) for turn in (CHAT if of == "messages" else TALK)]
    for turn, change in zip(reversed(talk), changes, strict=False):
        turn.update(change)
    return {of: talk}


def converted(
    path: Path, kind: str, processes: int = 1, fixed_rows: list[Path] | None = None, **settings: Any
) -> UnreadKeys:
    """Convert a file of texts in the folder of data set `mine`; return the unread keys."""
    dataset = DatasetSettings(kind=kind, train=str(path), modality="text", **settings)
    made = path.parent / "mine" / "train.jsonl"
    make = form_rows(kind, "text", dataset.columns, dataset.prompt, None, dataset.ignore_keys)
    choice = dataset.choice("train")
    with open_rows([path], "train", fixed_rows or [], choice.read_columns) as rows:
        found = convert(rows, made, rejects := made.with_suffix(".rejects"), "train", make, choice, processes)
    assert found.digests == digests_of(made.parent, [made.name, rejects.name])
    return UnreadKeys(**{field: getattr(found, field) for field in UnreadKeys.__struct_fields__})


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_array(folder / "rows.json", rows)


STOPS = [
    ("prompt_completion", {"prompt": "What?", "completion": "It.", "system": "Be brief."}, "system"),
    ("alpaca", ASK | {"system_prompt": "Be brief."}, "system_prompt"),
    ("prompt_completion", {"prompt": "What?", "completion": "It.", "history": [["Hello.", "Hi."]]}, "history"),
    ("vqa", {"question": "What?", "answer": "It.", "answers": ["It."]}, "answers"),
    ("vqa", {"question": "What?", "answer": "A", "choices": ["It.", "I."]}, "choices"),
    ("alpaca", ASK | {"kto_tag": False}, "kto_tag"),
    ("prompt_completion", {"prompt": "What?", "completion": "It.", "label": False}, "label"),
    ("prompt_completion", {"prompt": "What?", "completion": "It.", "label": 0}, "label"),
    ("messages", turns() | {"label": False}, "label"),
    ("messages", turns() | {"system_prompt": "Be brief."}, "system_prompt"),
    ("messages", turns() | {"objects": {"ref": ["a disc"], "bbox": [[1, 2, 3, 4]]}}, "objects"),
    ("messages", turns() | {"rejected_response": "Nothing."}, "rejected_response"),
    ("messages", turns() | {"weight": 0.5}, "weight"),
    ("messages", turns() | {"videos": ["a.mp4"]}, "videos"),
    ("messages", turns({"weight": 0.5}), "messages.weight"),
    ("messages", turns({"loss": 2}), "messages.loss"),
    ("messages", turns({"loss_scale": 2.0}), "messages.loss_scale"),
    ("messages", turns({"train": [0, 1]}), "messages.train"),
    ("messages", turns({"training": "-1"}), "messages.training"),
    ("messages", turns({"trainable": 0}), "messages.trainable"),
    ("messages", turns({"train_on_turn": "no"}), "messages.train_on_turn"),
    ("messages", turns({"loss_weight": 0.9}), "messages.loss_weight"),
    ("messages", turns({"content": [{"type": "text", "text": "It.", "train": False}]}), "messages.content.train"),
    ("messages", turns({"loss_mask": [1, 0, 1]}), "messages.loss_mask"),
    ("messages", turns({"masked": True}), "messages.masked"),
    ("messages", turns({"train_detail": [{"begin_offset": 0, "train": False}]}), "messages.train_detail"),
    ("messages", turns() | {"loss_weight": 0.0}, "loss_weight"),
    ("messages", turns() | {"train": False}, "train"),
    ("alpaca", ASK | {"masked": 1}, "masked"),
    ("text", {"text": "It.", "weight": 0}, "weight"),
    ("messages", turns({}, {"tool_calls": [{"id": "1"}]}), "messages.tool_calls"),
    ("messages", turns({}, {"reasoning_content": "So."}), "messages.reasoning_content"),
    ("messages", turns({}, {"images": ["a.jpg"]}), "messages.images"),
    ("messages", turns({"weight": 3, "from": "user"}), "messages.weight"),
    ("sharegpt", turns(of="conversations") | {"functions": json.dumps([TOOL])}, "functions"),
    ("sharegpt", turns({"weight": 0.5}, of="conversations"), "conversations.weight"),
    ("sharegpt", turns({"loss_scale": 0}, of="conversations"), "conversations.loss_scale"),
    ("text", {"text": "It.", "audios": ["a.wav"]}, "audios"),
    ("vqa", {"question": "What?", "answer": "It.", "thinking": "Hm."}, "thinking"),
    ("prompt_completion", {"prompt": "What?", "completion": "It.", "reasoning": "Hm."}, "reasoning"),
    ("alpaca", ASK | {"system_message": "Be brief."}, "system_message"),
    ("alpaca", ASK | {"enable_thinking": False}, "enable_thinking"),
    ("messages", turns({"reasoning_details": [{"text": "Hm."}]}), "messages.reasoning_details"),
    ("messages", turns({"thought": "Hm."}), "messages.thought"),
]


@pytest.mark.parametrize(("kind", "row", "key"), STOPS, ids=[f"{kind}-{key}" for kind, _, key in STOPS])
def test_a_key_that_changes_what_a_row_means_stops_the_conversion(
    tmp_path: Path, kind: str, row: dict[str, Any], key: str
) -> None:
    """The message has the rows, the first one, its value, and the line that ignores the key; then try that line."""
    sound = {name: value for name, value in row.items() if name != key}
    if "messages" in row or "conversations" in row:
        sound |= turns(of="messages" if "messages" in row else "conversations")
    path = written(tmp_path, [sound, row, sound | {"id": 1}, row])
    prompt = {"prompt": "Say it."} if kind == "text" else {}
    with pytest.raises(VlmflowError) as raised:
        converted(path, kind, **prompt)
    assert f"\n  {key}: 2 of 4 rows, first in row 1 (counted from 0), with " in raised.value.cause
    assert raised.value.next_step.endswith(f"add this line to datasets.mine: ignore_keys: [{key}]")
    assert not (tmp_path / "mine" / "train.jsonl").exists()
    found = converted(path, kind, ignore_keys=[key], **prompt)
    assert found.ignored_keys == {key: 2}
    assert found.unread_keys[key] == 2


INSIDE = [
    ("messages", {"chat_template_kwargs": {"xml_tools": [json.dumps(TOOL)], "x": 1}}, "chat_template_kwargs.xml_tools"),
    ("messages", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ("messages", turns({"extra": {"reasoning": "Hm."}}), "messages.extra.reasoning"),
    ("sharegpt", turns({"extra": {"thinking": "Hm."}}, of="conversations"), "conversations.extra.thinking"),
    ("vqa", {"meta": {"System_Prompt": "Be brief."}}, "meta.System_Prompt"),
    ("prompt_completion", {"metadata.tools": [TOOL]}, "metadata.tools"),
]
SOUND = {
    "messages": turns(),
    "sharegpt": turns(of="conversations"),
    "vqa": {"question": "What?", "answer": "It."},
    "prompt_completion": {"prompt": "What?", "completion": "It."},
}


@pytest.mark.parametrize(("kind", "change", "key"), INSIDE)
@pytest.mark.parametrize("before", [None, {"x": 1}, "x"], ids=["null", "object", "text"])
def test_a_key_in_an_object_of_any_name_stops_the_conversion(
    tmp_path: Path, kind: str, change: dict[str, Any], key: str, before: Any
) -> None:
    """Also where earlier rows have something else there, so that a strict decoder takes them."""
    name = "meta" if kind == "vqa" else "chat_template_kwargs"
    sound = SOUND[kind] | {name: before}
    path = written(tmp_path, [sound, sound | {"id": 1}, sound, SOUND[kind] | change, sound])
    with pytest.raises(VlmflowError, match=f"\n  {key}: 1 of 5 rows, first in row 3 ") as raised:
        converted(path, kind)
    assert raised.value.next_step.endswith(f"ignore_keys: [{key}]")
    assert converted(path, kind, ignore_keys=[key]).ignored_keys == {key: 1}


def test_a_struct_of_parquet_stops_too(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "kwargs": {"tools": tools, "x": "y"}} for tools in ("", json.dumps([TOOL]))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(VlmflowError, match=r"kwargs\.tools: 1 of 2 rows"):
        converted(tmp_path / "rows.parquet", "messages")


LONG = "A disc lies on a cube of wood."


@pytest.mark.parametrize(
    ("key", "value", "stops"),
    [
        ("caption", lambda n: f"{LONG} {n}", True),
        ("captions", lambda n: [f"{LONG} {n}", "x"], True),
        ("german", lambda n: [{"role": "user", "content": f"Was steht auf Seite {n}?"}], True),
        ("图片说明", lambda n: f"木头方块上放着一个圆盘，还有三本书第{n}页", True),
        ("url", lambda n: f"pictures/{LONG.replace(' ', '/')}/{n}", False),
        ("licence", lambda n: LONG * 3, False),
        ("text", lambda n: f"### Human: What?\n\n### Assistant: It is on page {n}.", False),
        ("question", lambda n: f"What is  shown on page {n}?", False),
        ("note", lambda n: f"On page {n}" if n else None, False),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_unread_texts_as_long_as_the_answers_stop(
    tmp_path: Path, key: str, value: Callable[[int], Any], stops: bool, suffix: str
) -> None:
    """Texts that the conversation has, or that repeat it, are no loss, nor are names and what all rows share."""
    rows = [{"question": f"What is shown on page {n}?", "answer": f"It is on page {n}."} for n in range(5)]
    if key == "text":
        rows = [row | {"question": "What?"} for row in rows]
    table = [
        (row if key != "question" else {**row, "ask": row["question"]}) | {key: value(n)} for n, row in enumerate(rows)
    ]
    columns = {"question": "ask"} if key == "question" else {}
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_bytes(msgspec.json.Encoder().encode_lines(table))
    else:
        pq.write_table(pa.Table.from_pylist(table), path)
    dataset = DatasetSettings(kind="vqa", train=str(path), columns=columns)
    with open_rows([path], "train", [], dataset.read_columns) as read:
        if not stops:
            refuse_unread_texts(read, form_rows("vqa", "text", columns, None, None), "mine")
            return
        with pytest.raises(VlmflowError, match=f"\n  {key}: 5 of the first 5 rows, ") as raised:
            refuse_unread_texts(read, form_rows("vqa", "text", columns, None, None), "mine", "vqa: found")
        assert raised.value.next_step.endswith(f"add these lines to datasets.mine: kind: vqa, ignore_keys: [{key}]")
        ignored = form_rows("vqa", "text", columns, None, None, [key])
        refuse_unread_texts(read, ignored, "mine")


def test_long_texts_in_an_unread_column_are_looked_at_as_far_as_they_are_read(tmp_path: Path) -> None:
    """Of long texts, a table gives fewer rows than are looked at."""
    note = [f"{number} " + "A long text about a disc. " * 4_000 for number in range(300)]
    table = {"question": [f"What {n}?" for n in range(300)], "answer": ["It."] * 300, "note": note}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    columns = DatasetSettings(kind="vqa", train="x").read_columns
    with open_rows([tmp_path / "rows.parquet"], "train", [], columns) as rows:
        assert 1 < len(rows.files[0].unread_texts["note"]) < 200
        with pytest.raises(VlmflowError, match=r"note: \d+ of the first 200 rows"):
            refuse_unread_texts(rows, form_rows("vqa", "text", {}, None, None), "mine")


HIDDEN = [
    ("alpaca", json.dumps(ASK | {"System": "Be brief."}), "system"),
    ("messages", json.dumps(turns() | {"systemPrompt": "Be brief."}), "system_prompt"),
    ("messages", json.dumps(turns({"Loss": False})), "messages.loss"),
    ("messages", json.dumps(turns({"lossWeight": 0})), "messages.loss_weight"),
    ("messages", json.dumps(turns() | {"Train-Detail": [0]}), "train_detail"),
    ("messages", json.dumps(turns({"toolCalls": [{"id": "1"}]})), "messages.tool_calls"),
    ("messages", json.dumps(turns({"from": "user", "weight": 7})), "messages.weight"),
    ("messages", json.dumps(turns({"from": ["user"], "Weight": 0})), "messages.weight"),
    ("messages", json.dumps(turns() | {"Tools": [TOOL]}), "tools"),
    ("alpaca", json.dumps(ASK)[:-1] + f', "weight": {"9" * 400}}}', "weight"),
    ("alpaca", json.dumps(ASK)[:-1] + f', "tools": {"[" * 900}{"]" * 900}}}', "tools"),
    ("alpaca", json.dumps(ASK)[:-1] + ', "tools": "\u202e\u009b31m"}', "tools"),
]
"""In another letter case, in the wrong speaker's turn, too large, too deep, and with terminal control codes."""


@pytest.mark.parametrize(("kind", "row", "key"), HIDDEN)
def test_a_key_that_is_hidden_stops_the_conversion_too(tmp_path: Path, kind: str, row: str, key: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f"[{row}]")
    with pytest.raises(VlmflowError) as raised:
        converted(path, kind)
    assert f"\n  {key}: 1 of 1 rows, first in row 0" in raised.value.cause
    assert raised.value.cause.replace("\n", "").isprintable()


NEUTRAL = [
    ("alpaca", ASK | {"system": "", "history": [], "tools": None, "label": True, "weight": 1, "kto_tag": None}),
    ("alpaca", ASK | {"system": " \n", "history": [["", ""]], "tools": "[]", "label": "positive", "weight": 1.0}),
    ("alpaca", ASK | {"weight": "nan", "system": "NaN", "label": ""}),
    ("alpaca", ASK | {"label": 3, "weight": "heavy", "chosen": None, "rejected": {}, "videos": []}),
    ("messages", turns({"weight": 1, "loss": True, "tool_calls": [], "function_call": None, "train": True})),
    ("messages", turns({}, {"weight": 0, "loss": False, "masked": True, "training": False})),
    ("messages", turns({"masked": False, "training": True, "train_detail": None, "loss_mask": [1, 1]})),
    ("messages", turns({"name": "Bob", "refusal": None})),
    ("text", {"text": "It.", "system": "Linux", "label": False, "weight": 70}),
]


@pytest.mark.parametrize(("kind", "row"), NEUTRAL)
def test_null_empty_and_neutral_values_never_stop(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    """Nor does a user's turn, which is not trained anyway, nor a key without meaning in its form."""
    found = converted(written(tmp_path, [row, row]), kind, **({"prompt": "Say it."} if kind == "text" else {}))
    unread_keys = {key for key in row if key not in (*form_of(kind).keys, "messages", "text")}
    in_turns = {key for turn in row.get("messages", []) for key in turn} - {*CHAT[0], *LOSS_KEYS, *CALL_KEYS}
    unread_keys |= {f"messages.{key}" for key in in_turns}
    assert found.unread_keys == dict.fromkeys(sorted(unread_keys), 2)
    assert found.ignored_keys == {}


def test_a_key_that_is_read_may_be_ignored_unless_every_row_needs_it(tmp_path: Path) -> None:
    path = written(tmp_path, [ASK | {"system": "Be brief.", "history": [["Hello.", "Hi."]]}])
    found = converted(path, "alpaca", ignore_keys=["system", "history"])
    assert found.ignored_keys == {"history": 1, "system": 1}
    made = json.loads((tmp_path / "mine" / "train.jsonl").read_text())
    assert [turn["value"] for turn in made["conversations"]] == ["What?", "It."]


def test_preference_data_names_all_of_its_keys_at_once(tmp_path: Path) -> None:
    """Like LLaMA-Factory's dpo_en_demo.json: a question, and two answers next to it."""
    asked = [*TALK, {"from": "human", "value": "And?"}]
    row = {"conversations": asked, "chosen": TALK[1], "rejected": {"from": "gpt", "value": "No."}}
    path = written(tmp_path, [row] * 3)
    with pytest.raises(VlmflowError) as raised:
        converted(path, "sharegpt")
    assert "chosen: 3 of 3 rows" in raised.value.cause
    assert "rejected: 3 of 3 rows" in raised.value.cause
    assert "ignore_keys: [chosen, rejected]" in raised.value.next_step
    with pytest.raises(VlmflowError, match="rejected: 3 of 3") as raised:
        converted(path, "sharegpt", ignore_keys=["chosen"])
    assert "ignore_keys: [chosen, rejected]" in raised.value.next_step
    assert converted(path, "sharegpt", ignore_keys=["chosen", "rejected"]).unanswered_last_turns == 3


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sharegpt", {"conversations": TALK[:1], "chosen": TALK[1], "rejected": {"from": "gpt", "value": "No."}}),
        ("messages", {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [CHAT[1] | {"content": "No."}]}),
        ("messages", turns({"role": "narrator"}) | {"chosen": "It.", "rejected": "No."}),
    ],
)
def test_rejected_rows_name_their_keys_too(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    """As in ms-swift's, LLaMA-Factory's and TRL's preference data: without this, another fault is named."""
    path = written(tmp_path, [turns(of="messages" if kind == "messages" else "conversations"), row, row])
    with pytest.raises(VlmflowError, match=r"chosen: 2 of 3 rows, first in row 1(.|\n)*rejected: 2 of 3 rows"):
        converted(path, kind)
    found = converted(path, kind, ignore_keys=["chosen", "rejected"])
    assert found == UnreadKeys(unread_keys={}, ignored_keys={}, unanswered_last_turns=0)


def test_rows_that_are_left_out_stop_nothing(tmp_path: Path) -> None:
    """Rows of another modality are not trained, nor is the answer of a rejected row."""
    bad = turns({"role": "narrator", "weight": 0.5})
    found = converted(written(tmp_path, [turns(), bad, turns() | {"image": "a.jpg", "label": False}]), "messages")
    assert found == UnreadKeys(unread_keys={}, ignored_keys={}, unanswered_last_turns=0)


def test_a_key_that_is_not_utf8_hides_no_other_key(tmp_path: Path) -> None:
    """As in a cp1252 file: the texts that are read are plain, an unread key is not."""
    path = tmp_path / "rows.jsonl"
    keys = [b'"cat\xe9gorie": "x", "label": false', b'"label": false, "cat\xe9gorie": "x"', b'"cat\xe9gorie": "x"']
    path.write_bytes(b"".join(b'{"prompt": "q", "completion": "a", %s}\n' % key for key in keys))
    with pytest.raises(VlmflowError, match="label: 2 of 3 rows"):
        converted(path, "prompt_completion")
    found = converted(path, "prompt_completion", ignore_keys=["label"])
    assert found.unread_keys == {"cat\ufffdgorie": 3, "label": 2}
    row = json.dumps(fire_row(more=1)).replace("more", "caf\xe9").encode("latin-1")
    make = fire_rows(training_form("trajectory"), RowLimits())
    assert not isinstance(make("id", 0, row), Reject)
    assert make.unread.take().keys["caf\ufffd"] == 1


def test_an_index_that_pandas_wrote_is_an_unread_column(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(",prompt,completion\n0,q,a\n1,q,b\n")
    assert converted(tmp_path / "rows.csv", "prompt_completion").unread_keys == {"Unnamed: 0": 2}
    table = pa.table({"prompt": ["q", "q"], "completion": ["a", "b"], "__index_level_0__": [7, 9]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert converted(tmp_path / "rows.parquet", "prompt_completion").unread_keys == {"__index_level_0__": 2}


def test_a_table_stops_too(tmp_path: Path) -> None:
    """All CSV values are texts; unread parquet columns are counted without being read."""
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["prompt", "completion", "label", "note"], ["q", "a", "True", "x"], ["q", "b", "False", ""]])
    with pytest.raises(VlmflowError, match=r'label: 1 of 2 rows, first in row 1 \(counted from 0\), with "False"'):
        converted(tmp_path / "rows.csv", "prompt_completion")
    table = [{"messages": CHAT, "chosen": None, "note": 1}, {"messages": CHAT, "chosen": "[1]", "note": 2}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    with pytest.raises(VlmflowError, match="chosen: 1 of 2 rows"):
        converted(tmp_path / "rows.parquet", "messages")
    found = converted(tmp_path / "rows.parquet", "messages", ignore_keys=["chosen"])
    assert found.unread_keys == {"note": 2, "chosen": 2}
    sounds = [{"prompt": "q", "completion": "a", "audio": {"bytes": b"RIFF\xff", "path": "a.wav"}}]
    pq.write_table(pa.Table.from_pylist(sounds), tmp_path / "sounds.parquet")
    with pytest.raises(VlmflowError, match=r"audio: 1 of 1 rows"):
        converted(tmp_path / "sounds.parquet", "prompt_completion")


def test_a_key_of_another_name_is_the_one_that_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, [{"system": "What?", "output": "It.", "instruction": "!"}])
    found = converted(path, "alpaca", columns={"instruction": "system"})
    assert found.unread_keys == {"instruction": 1}
    chat = written(tmp_path, [{"chat": turns({"weight": 0.5})["messages"]}])
    with pytest.raises(VlmflowError, match=r"chat\.weight: 1 of 1 rows"):
        converted(chat, "messages", columns={"messages": "chat"})


def test_fire_rows_are_counted_too(tmp_path: Path) -> None:
    path = written(tmp_path, [fire_row(question=f"q{n}", **({"more": n} if n % 3 else {})) for n in range(9)])
    with open_rows([path], "train") as rows:
        make = fire_rows(training_form("trajectory"), RowLimits())
        choice = DatasetSettings(kind="fire", train="x").choice("train")
        found = convert(rows, tmp_path / "made", tmp_path / "rejects", "train", make, choice, 1)
    assert found.unread_keys == {"conversations.type": 9, "groundtruth": 9, "more": 6, "round": 9}


def test_counts_are_the_same_on_any_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More names of keys than are kept, and rows with many kinds of keys, in many shards."""
    monkeypatch.setattr("vlmflow.rows.strict_rows.NAMES_KEPT", 40)
    monkeypatch.setattr("vlmflow.rows.convert.SHARD_BYTES", 2_000)
    long = {"n" * 200: 1}
    rows = [
        turns({f"t{n // 3 % 3}": n}, {f"t{n // 3 % 3}": n}) | {f"k{n // 3 % 97}": n} | (long if n // 3 % 5 == 0 else {})
        for n in range(600)
    ]
    one, two = (converted(written(tmp_path, rows), "messages", processes) for processes in (1, 2))
    assert one == two
    assert len(one.unread_keys) == 40
    assert sum(one.unread_keys.values()) + one.further_unread_keys == 600 + 600 + 120
    assert max(map(len, one.unread_keys)) == 100


KEYS = st.sampled_from(["id", "x", 'a"b', "é", "label", "loss_scale", "history", "", "y" * 120])
VALUES = st.sampled_from([None, 0, 1, "", "x", [], [1], {}, {"a": 1}, True, False])
MORE = st.dictionaries(KEYS, VALUES, max_size=4)


@given(rows=st.lists(st.tuples(MORE, MORE, MORE), min_size=1, max_size=30))
def test_counts_are_those_of_a_plain_loop(rows: list[tuple[Any, Any, Any]], tmp_path_factory) -> None:
    made = [{"messages": [CHAT[0] | one, CHAT[1] | two]} | more for one, two, more in rows]
    counts: Counter[str] = Counter()
    for one, two, more in rows:
        counts.update({key[:100] for key in [*more, *(f"messages.{key}" for key in {**one, **two})]})
    make = form_rows("messages", "text", {}, None, None)
    for number, row in enumerate(made):
        assert make("id", number, msgspec.json.encode(row))
    found = make.unread.take()
    assert found.keys == counts
    assert found.rows == len(rows)
    assert found.meant["label"] == sum(more.get("label", 1) in (0,) for *_, more in rows)


def test_a_key_without_a_meaning_cannot_be_ignored() -> None:
    for key, kind in (("messages", "messages"), ("prompt", "prompt_completion"), ("text", "text")):
        with pytest.raises(ValueError, match=f"ignore_keys: '{key}' never stops a row of kind {kind}"):
            DatasetSettings(kind=kind, train="x", prompt="p" if kind == "text" else None, ignore_keys=[key])
    with pytest.raises(ValueError, match="'label' never stops a row of kind fire; these do: weight, "):
        DatasetSettings(kind="fire", train="x", ignore_keys=["label"])


@pytest.mark.parametrize(("key", "value"), [("loss", False), ("lossWeight", 0), ("train_detail", [0]), ("weight", 0)])
def test_what_is_not_trained_stops_fires_rows_too(key: str, value: Any) -> None:
    """In an answer or in the row; feedback is not trained anyway."""
    rows = [fire_row(), fire_row(rounds=2), fire_row(rounds=2), fire_row() | {key: value}]
    rows[1]["conversations"][1][key] = value
    rows[2]["conversations"][2][key] = value
    make = fire_rows(training_form("trajectory"), RowLimits(), ignore_keys=["weight"])
    for number, row in enumerate(rows):
        assert not isinstance(make("id", number, json.dumps(row).encode()), Reject)
    found, meant = make.unread.take(), {"lossWeight": "loss_weight"}.get(key, key)
    assert found.meant == {f"conversations.{meant}": 1, meant: 1}
    assert found.first[f"conversations.{meant}"][0] == 2
    with pytest.raises(VlmflowError, match=f"conversations.{meant}: 1 of 4 rows"):
        found.refuse("raw", "fire", make.unread.meaning, make.unread.ignored)
