"""`kind: auto`: what it finds in the first rows, what it says, and what it leaves to people."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converted_rows import converted_rows
from real_rows import example_of_a_form
from vlmflow.core.errors import VlmflowError

CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]
TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]
ASKED = ["human: What?", "gpt: It."]

EXAMPLES = {
    "01-messages.jsonl": ("messages", "messages"),
    "02-messages-system.jsonl": ("messages", "messages"),
    "03-messages-several-pictures.json": ("messages", "messages"),
    "04-sharegpt-system-tools-beside.json": ("sharegpt", "conversations"),
    "07-openai-two-pictures.jsonl": ("messages", "messages"),
    "10-anthropic-tools.jsonl": ("messages", "messages"),
    "14-oumi.jsonl": ("messages", "messages"),
    "18-swift-tool-pictures.jsonl": ("messages", "messages"),
    "20-query-response-history.jsonl": ("query_response", "query, response"),
    "21-alpaca-system-history.json": ("alpaca", "instruction, output"),
    "22-trl-prompt-completion-lists.jsonl": ("messages", ""),
    "23-swift-sharegpt-pairs.jsonl": ("pairs", "conversation"),
    "24-llava.json": ("sharegpt", "conversations"),
    "25-llava-interleave-m4.json": ("sharegpt", "conversations"),
    "40-hub-image-column.parquet": ("sharegpt", "conversations"),
    "41-cauldron-finevision.parquet": ("texts", "texts"),
    "42-trl-vision.parquet": ("messages", "messages"),
    "44-pandas-bytes.parquet": ("vqa", "question, answer"),
    "45-pandas-base64.csv": ("vqa", "question, answer"),
    "46-pandas.jsonl": ("messages", "messages"),
    "47-pandas-messages.parquet": ("messages", "messages"),
    "49-datasets-json-column.parquet": ("messages", "messages"),
    "70-array-in-jsonl.jsonl": ("messages", "messages"),
    "72-data-key.json": ("messages", "messages"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_makers_files_are_found_out(tmp_path: Path, name: str) -> None:
    """The account says the kind and why; the rows and their pictures are those of this kind."""
    kind, needs = EXAMPLES[name]
    file, mine = example_of_a_form(name), tmp_path / "own"
    mine.mkdir()
    found, own = converted_rows(tmp_path, file, kind="auto"), converted_rows(mine, file, kind=kind)
    number = len(own.rows)
    reads = f"have {needs}" if needs else f"can be written as {kind}"
    said = f"{kind}: {number} of the first {number} rows {reads}, and no other kind reads them"
    assert found.unread["found_kind"] == said
    assert "found_kind" not in own.unread
    assert (found.talks, found.named) == (own.talks, own.named)
    assert number >= 2
    assert found.rejects == {}


@pytest.mark.parametrize(
    ("name", "what", "advice"),
    [
        ("26-dpo.json", "lose what rows have under chosen, rejected", "kind: sharegpt, and take: chosen"),
        ("27-trl-preference.jsonl", "finds no kind", "kind: messages and take: chosen; or the kind in datasets"),
        ("28-kto.json", "lose what rows have under label", "kind: messages, and take: true"),
        ("32-text.jsonl", "finds no kind for its rows; the first one has 'text'", "write kind: text, prompt: …"),
        ("19-swift-grounding.jsonl", "lose what rows have under objects", "ignore_keys: [obj"),
        ("31-video.jsonl", "finds messages, which would lose what rows have under videos", "ignore_keys: [videos]"),
        ("43-hub-vqa.parquet", "lose what rows have under answers", "kind: vqa, and columns: {answer: …}"),
        (
            "62-imagefolder/metadata.jsonl",
            "finds no kind for its rows; the first one has 'file_name', 'text'",
            "kind: text, prompt: …, columns: {image: file_name}; or the kind",
        ),
    ],
)
def test_what_loses_something_or_needs_more_is_left_to_people(
    tmp_path: Path, name: str, what: str, advice: str
) -> None:
    with pytest.raises(VlmflowError) as raised:
        converted_rows(tmp_path, example_of_a_form(name), kind="auto")
    assert what in raised.value.cause
    assert advice in raised.value.next_step


def test_a_choice_among_answers_is_no_loss(tmp_path: Path) -> None:
    row = {"conversations": TALK[:1], "chosen": TALK[1], "rejected": TALK[1]}
    found = converted_rows(tmp_path, [row] * 2, kind="auto", take="chosen")
    assert found.unread["found_kind"].startswith("sharegpt: 2 of the first 2 rows")
    assert found.talks == [ASKED] * 2
    found = converted_rows(tmp_path, [{"messages": CHAT, "label": n > 0} for n in range(3)], kind="auto", take=True)
    assert found.talks == [ASKED] * 2


@pytest.mark.parametrize(
    ("row", "what", "advice"),
    [
        ({"messages": CHAT, "conversations": TALK}, "messages (messages); sharegpt (conversations)", "kind: messages"),
        ({"prompt": "a", "completion": "b", "question": "c", "answer": "d"}, "prompt_completion (prompt, comple", ""),
        ({"prompt": "a", "completion": "b", "Img": "a/1.PNG"}, "under Img", "columns: {image: Img}"),
        ({"messages": CHAT, "frames": ["a.jpg", "b.jpg"]}, "under frames", "columns: {image: frames}"),
        ({"messages": CHAT, "videos": ["a.mp4"]}, "lose what rows have under videos", "ignore_keys: [videos]"),
        ({"prompt": "a", "completion": "b", "photo": "http://x.y/a.jpg?s"}, "under photo", "columns: {image: photo}"),
        ({"messages": CHAT, "meta": {"image": "a.png"}}, "under meta", "the pictures of meta under a key image"),
        ({"messages": CHAT, "photo": f"data:image/png;base64,{'A' * 80}"}, "under photo", "columns: {image: photo}"),
        ({"question": "a", "answer": "b", "context": "c"}, "under context", "rows whose question holds context"),
        ({"instruction": "a", "output": "b", "context": "c"}, "under context", "columns: {input: context}"),
        ({"instruction": "a", "output": "b", "system_prompt": "c"}, "under", "columns: {system: system_prompt}"),
        ({"messages": CHAT, "videos": [["a.jpg"]]}, "lose what rows have under videos", "frames_as_pictures: 8"),
        ({"conversation": CHAT}, "finds no kind", "write kind: messages, columns: {messages: conversation}; or"),
        ({"messages": TALK}, "finds no kind", "write kind: sharegpt, columns: {conversations: messages}; or"),
        ({"prompt": "a", "completion": "b", "system": "Be brief."}, "under system", "ignore_keys: [system]"),
        ({"title": "a", "body": "b"}, "finds no kind for its rows; the first one has 'title', 'body'", "columns"),
        ({"question": {"role": "user", "value": "a"}, "image": "a.jpg", "conversations": []}, "", "write kind: fire"),
        ({}, "the first one has no key", "kind"),
        (3, "finds no kind, since no row is a JSON object", "name another file"),
    ],
)  # fmt: skip
def test_a_tie_and_a_loss_are_refused(tmp_path: Path, row: Any, what: str, advice: str) -> None:
    with pytest.raises(VlmflowError) as raised:
        converted_rows(tmp_path, [row] * 3, kind="auto")
    assert what in raised.value.cause
    assert advice in raised.value.next_step
    assert not (tmp_path / "mine" / "train.jsonl").exists()


def test_broken_rows_hide_no_kind(tmp_path: Path) -> None:
    """Below one half, they are rejected as in any file."""
    raw = tmp_path / "rows.jsonl"
    sound = json.dumps({"messages": CHAT, "images": ["a/1.png"]}) + "\n"
    raw.write_text("3\n" + '{"messages": 1}\n' + "{\n" + sound * 3)
    found = converted_rows(tmp_path, raw, kind="auto")
    assert found.unread["found_kind"].startswith("messages: 3 of the first 6 rows")
    assert list(found.rejects.values()) == ["bad_shape", "bad_shape", "bad_json"]
    assert found.named == ["a/1.png"]
    raw.write_text("3\n" * 4 + sound * 3)
    with pytest.raises(VlmflowError, match="finds no kind"):
        converted_rows(tmp_path, raw, kind="auto")


def test_pictures_may_have_another_name_but_other_keys_have_their_own(tmp_path: Path) -> None:
    rows = [{"question": "What?", "answer": "It.", "file": f"{n}.png"} for n in range(2)]
    found = converted_rows(tmp_path, rows, kind="auto", columns={"image": "file"})
    assert found.named == ["0.png", "1.png"]
    with pytest.raises(ValueError, match=r"ignore_keys: .* applies to every kind but auto"):
        converted_rows(tmp_path, rows, kind="auto", ignore_keys=["system"])
    with pytest.raises(ValueError, match="rows of kind auto have: image, images, source"):
        converted_rows(tmp_path, rows, kind="auto", columns={"answer": "reply"})


def test_keys_of_pictures_count_in_any_letter_case(tmp_path: Path) -> None:
    row = {"question": "What?", "answer": "It.", "Image": "a/1.png"}
    made = converted_rows(tmp_path, [row], kind="auto")
    assert [row.images for row in made.rows] == [["a/1.png"]]
    assert made.unread["found_kind"].startswith("vqa")


def test_all_columns_of_a_table_are_seen(tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "What?", "answer": "It.", "picture": "a.jpg", "n": 1}]), table)
    with pytest.raises(VlmflowError, match="under picture"):
        converted_rows(tmp_path, table, kind="auto")
    found = converted_rows(tmp_path, table, kind="auto", columns={"image": "picture"})
    assert (found.talks, found.named) == ([["human: <image>\nWhat?", "gpt: It."]], ["a.jpg"])
    assert found.unread["unread_keys"] == {"n": 1}


def test_a_kind_that_reads_no_pictures_of_rows_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows without a picture may have it under another key; those with one have a name of their file there."""
    bytes_of = {"bytes": b"\xff\xd8\xff", "path": None}
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT, "photo": bytes_of}]), tmp_path / "rows.parquet")
    converted_rows(tmp_path, tmp_path / "rows.parquet", kind="messages")
    assert "some under 'photo', which is not read: columns: {image: photo}" in caplog.text
    caplog.clear()
    converted_rows(tmp_path, [{"messages": CHAT, "file": "a.png"}], kind="messages")
    assert "some under 'file'" in caplog.text
    caplog.clear()
    converted_rows(tmp_path, [{"messages": CHAT, "file": "a.png", "image": "b/a.png"}], kind="messages")
    assert not caplog.text
