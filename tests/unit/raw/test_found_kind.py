"""`kind: auto` and files whose names say another kind than their content: what is found, said, and left to people."""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest

from made_rows import converted_rows, example_of_a_form
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import copy
from vlmflow.raw.split import open_rows

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
        ({"prompt": "a", "completion": "b", "image": "a.jpg", "depth": "b.png"}, "under depth", "ignore_keys: [depth]"),
        ({"messages": CHAT, "frames": ["a.jpg", "b.jpg"]}, "under frames", "columns: {image: frames}"),
        ({"messages": CHAT, "videos": ["a.mp4"]}, "lose what rows have under videos", "ignore_keys: [videos]"),
        ({"prompt": "a", "completion": "b", "photo": "http://x.y/a.jpg?s"}, "under photo", "once you have downloaded"),
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


@pytest.mark.parametrize(
    "beside",
    [{"url": "https://x.org/1.jpg"}, {"thumbnails": ["http://x.org/1.png"]}, {"file_name": "1.png"}],
    ids=str,
)
def test_where_a_picture_came_from_is_no_loss(tmp_path: Path, beside: dict[str, Any]) -> None:
    """An address, or the name of the same file, beside a picture that is read."""
    row = {"conversations": TALK, "image": "a/1.png"}
    found = converted_rows(tmp_path, [row | beside] * 2, kind="auto")
    assert found.named == ["a/1.png"]
    depth = row | {"depth": "b.png"}
    (tmp_path / "advice").mkdir()
    assert converted_rows(tmp_path / "advice", [depth], kind="sharegpt", ignore_keys=["depth"]).named == ["a/1.png"]
    assert found.unread["unread_keys"] == dict.fromkeys(beside, 2)


def test_keys_of_pictures_count_in_any_letter_case(tmp_path: Path) -> None:
    row = {"question": "What?", "answer": "It.", "Image": "a/1.png"}
    made = converted_rows(tmp_path, [row], kind="auto")
    assert [row.images for row in made.rows] == [["a/1.png"]]
    assert made.unread["found_kind"].startswith("vqa")


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("vqa", {"question": "What?", "answer": "It."}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]}),
        ("alpaca", {"instruction": "What?", "output": "It."}),
        ("query_response", {"query": "What?", "response": "It."}),
        ("prompt_completion", {"prompt": "What?", "completion": "It."}),
    ],
)
def test_every_kind_names_an_unread_key_with_pictures(
    kind: str, row: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    converted_rows(tmp_path, [row | {"image_path": "a/1.png"}], kind=kind)
    assert "some under 'image_path', which is not read: columns: {image: image_path}" in caplog.text
    caplog.clear()
    converted_rows(tmp_path, [row | {"image": "a/1.png", "image_path": "a/1.png"}], kind=kind)
    assert "which is not read" not in caplog.text


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


ROW = b'{"prompt": "q", "completion": "a"}'
ROWS = (ROW + b"\n") * 3
TABLE = pa.table({"prompt": ["q"], "completion": ["a"]})


def packed(*names: str) -> bytes:
    with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, ROWS)
    return content.getvalue()


def written(write: object) -> bytes:
    content = io.BytesIO()
    write(TABLE, content)  # type: ignore[operator]
    return content.getvalue()


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".tsv", ".parquet", ""])
@pytest.mark.parametrize(
    ("content", "what", "next_step"),
    [
        (gzip.compress(ROWS), "compressed (gzip)", "unpack it, and name the unpacked file"),
        (bz2.compress(ROWS), "compressed (bzip2, xz", "unpack it"),
        (lzma.compress(ROWS), "compressed (bzip2, xz", "unpack it"),
        (packed("rows.jsonl"), "a ZIP archive", "unpack it"),
        (packed("[Content_Types].xml", "xl/workbook.xml"), "an Excel workbook", "save the table as CSV"),
        (written(pyarrow.feather.write_feather), "in Arrow's form", "write it as parquet"),
        (ROWS.decode().encode("utf-16"), "in UTF-16", "save the file as UTF-8"),
        (ROWS.decode().encode("utf-16-be"), "in UTF-16", "save the file as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "a web page", "fetch the file again"),
    ],
    ids=("gzip", "bzip2", "xz", "zip", "excel", "arrow", "utf-16", "utf-16 big", "lfs", "page"),
)
def test_what_a_file_really_is(tmp_path: Path, content: bytes, what: str, next_step: str, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content)
    with pytest.raises(VlmflowError) as error:
        open_rows([file], "train")
    said = f"its name ends with {suffix}, but it is {what}" if suffix else f": the file is {what}"
    assert said in error.value.cause
    assert next_step in error.value.next_step


def stream() -> bytes:
    """Return a table as `save_to_disk` writes it."""
    with pa.ipc.new_stream(content := io.BytesIO(), TABLE.schema) as file:
        file.write(TABLE)
    return content.getvalue()


NAMED = "and name the unpacked file (datasets.NAME.train, val, test)"
AS_CSV = "save the table as CSV in UTF-8, and name that file (datasets.NAME.train, val, test)"
ACCENTS = "prompt,completion\n" + "où?,là\n" * 5
HELD = "an object holds the rows under its key 'train'; more follows, or they are damaged"
FROM_DISK = (
    'write it as parquet, and name that file: datasets.load_from_disk(FOLDER).to_parquet("rows.parquet"); if it has '
    'several splits, datasets.load_from_disk(FOLDER)["train"].to_parquet("rows.parquet")'
)
UTF_8 = "write it again in UTF-8, and name that file: iconv -f"
KNOWN = {
    "rows.jsonl.gz": (
        gzip.compress(ROWS),
        "the file is compressed (gzip)",
        f"unpack it, {NAMED}: gunzip rows.jsonl.gz",
    ),
    "rows.xlsx": (packed("[Content_Types].xml", "xl/workbook.xml"), "the file is an Excel workbook", AS_CSV),
    "rows.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(80), "the file is an old Excel workbook", AS_CSV),
    "data-00000-of-00001.arrow": (stream(), "the file is in Arrow's form, of `save_to_disk`", FROM_DISK),
    "my rows.csv": (
        ACCENTS.encode("cp1252"),
        "the file is not in UTF-8",
        f"{UTF_8} WINDOWS-1252 -t UTF-8 'my rows.csv' > 'utf-8-my rows.csv'",
    ),
    "rows.json": (
        ("[" + ", ".join(['{"prompt": "“déjà” vu"}'] * 4) + "]").encode("cp1252"),
        "the file is not in UTF-8",
        f"{UTF_8} WINDOWS-1252 -t UTF-8 rows.json > utf-8-rows.json",
    ),
    "rows.jsonl": (
        ('{"prompt": "你好吗"}\n' * 10).encode("gb18030"),
        "the file is not in UTF-8",
        f"{UTF_8} ENCODING -t UTF-8 rows.jsonl > utf-8-rows.jsonl (ENCODING is its own, such as GB18030)",
    ),
    "header.csv": (
        "größe,prompt\nx,y\n".encode("latin-1"),
        "the header is not UTF-8",
        f"{UTF_8} WINDOWS-1252 -t UTF-8 header.csv > utf-8-header.csv",
    ),
    "two.json": (
        b'{"train": [%s], "test": [%s]}' % (ROW, ROW),
        HELD,
        "write only them, and name that file: jq -c '.train[]' two.json > rows.jsonl",
    ),
    "cut.json": (
        b'{"train": [%s, {"pro' % ROW,
        HELD,
        "write only them, and name that file: jq -c '.train[]' cut.json > rows.jsonl",
    ),
    "text.json": (b"some text\n" * 9, "neither a JSON array nor JSON lines", "give a JSON array or JSON lines"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_people_have_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    """In one line each, without the first bytes of the file."""
    content, what, next_step = KNOWN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VlmflowError) as error:
        open_rows([tmp_path / name], "train")
    assert error.value.cause == f"{tmp_path / name}: {what}"
    assert error.value.next_step.startswith(next_step) if name == "text.json" else error.value.next_step == next_step
    assert repr(content[:8])[2:-1] not in str(error.value)


@pytest.mark.parametrize(
    ("name", "made", "row"),
    [
        ("rows.jsonl.gz", "rows.jsonl", ROW),
        ("my rows.csv", "utf-8-my rows.csv", b'{"prompt":"o\xc3\xb9?","completion":"l\xc3\xa0"}'),
    ],
)
def test_the_command_that_is_named_makes_rows(tmp_path: Path, name: str, made: str, row: bytes) -> None:
    content, _, next_step = KNOWN[name]
    (tmp_path / name).write_bytes(content)
    subprocess.run(["sh", "-c", next_step.rpartition(": ")[2]], cwd=tmp_path, check=True)
    with open_rows([tmp_path / made], "train") as rows:
        assert set(rows) == {row}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "is a folder, not a file\n  what to do: fix the path of the data file (config: datasets)"),
        (
            ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"),
            f"is a folder of `save_to_disk`\n  what to do: {FROM_DISK}",
        ),
        (("dataset_dict.json",), f"is a folder of `save_to_disk`\n  what to do: {FROM_DISK}"),
    ],
)
def test_a_folder_is_called_what_it_is(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    for opening in (lambda: open_rows([tmp_path], "train"), lambda: copy(tmp_path, tmp_path / "raw")):
        with pytest.raises(VlmflowError) as error:
            opening()
        assert str(error.value) == f"{tmp_path} {said}"


@pytest.mark.parametrize(
    "content",
    [
        ACCENTS.encode("cp1252").replace("là".encode("cp1252"), "là".encode(), 1),
        b"prompt,completion\n" + b"ou?,la\n" * 9 + b"\xff,\xff\n" * 4,
    ],
    ids=["some is UTF-8", "a few"],
)
def test_damage_to_some_rows_is_not_another_encoding(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with open_rows([tmp_path / "rows.csv"], "train") as rows:
        assert len(rows) == content.count(b"\n") - 1


def test_a_table_may_begin_like_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("PAR1,b\n1,2\n")
    with open_rows([file], "train") as rows:
        assert len(rows) == 1


def test_parquet_under_another_name_is_read_when_it_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(written(pyarrow.parquet.write_table))
    with pytest.raises(VlmflowError, match=r"but it is parquet") as error:
        open_rows([file], "train")
    assert error.value.next_step == "give its name the ending .parquet"
    file = file.rename(tmp_path / "rows.parquet")
    with open_rows([file], "train") as rows:
        assert len(rows) == 1


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{'x': 1}"}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "What?", "answer": 0}, r"as vqa, row 0: .*answer"),
        ({"messages": [{"role": "User", "content": "What?"}]}, r"as messages, row 0: .*User"),
        ({"messages": [CHAT[0] | {"content": [{"type": "input_file", "file_id": "x"}]}, CHAT[1]]}, "input_file"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": TOOLS},
            r"as messages, row 0: .*arguments",
        ),
        ({"messages": CHAT, "images": [{"url": "0.png"}]}, r"as messages, row 0: .*images"),
    ],
)
def test_auto_says_what_is_wrong_in_the_nearest_kind(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    """One thing may be wrong in every row."""
    with pytest.raises(VlmflowError, match=rf"kind auto finds no kind .*{said}"):
        converted_rows(tmp_path, [row] * 3, kind="auto")


@pytest.mark.parametrize(
    ("turns", "answer", "value"),
    [
        ("input", "output", "It is two."),
        ("inputs", "Outputs", [{"role": "assistant", "content": "It is two."}]),
        ("history", "response", "It is two."),
    ],
)
def test_turns_beside_their_answer_are_no_conversation(turns: str, answer: str, value: Any, tmp_path: Path) -> None:
    """The last answer of the history would be trained, and the question dropped."""
    row = {turns: [*CHAT, {"role": "user", "content": "And now?"}], answer: value}
    with pytest.raises(VlmflowError, match=rf"write each row's {answer} into the file as the last turn of its {turns}"):
        converted_rows(tmp_path, [row] * 3, kind="auto")
    with pytest.raises(VlmflowError, match=r"kind: messages, columns: \{messages: input\}"):
        converted_rows(tmp_path, [{"input": CHAT}] * 3, kind="auto")
