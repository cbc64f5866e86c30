"""Pictures in the data: named by content when a row is read, and written once for all rows."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drawn_pictures import drawn, encoded
from made_rows import converted_rows, example_of_a_form, form_rows
from stages import resolve_images
from vlmflow.config.settings import PictureLimits, RowChoice
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.named import EMBEDDED, name_of, path_of, pictures_of
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import Reject

RED, BLUE = encoded(drawn(64), "PNG"), encoded(drawn(80), "PNG")
TALK = {"prompt": "What?", "completion": "It."}
EMPTY = {"bytes": None, "path": None}


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def resolved(
    raw: Path, folder: Path, choice: RowChoice | None = None, roots: Sequence[str] = ()
) -> dict[str, str | None]:
    """Return the reason, or None, of every picture that is found."""
    resolve_images.main(
        raw=[raw],
        manifest=folder / "train.jsonl",
        dataset="own",
        roots=list(roots),
        store=folder / "store",
        limits=PictureLimits(),
        choice=choice,
    )
    return {entry.path: entry.reason for entry in read_picture_manifest(folder / "train.jsonl")}


def test_a_picture_has_its_name_by_content_however_it_is_written() -> None:
    name = name_of(RED)
    assert name == f"embedded/{name[9:11]}/{hashlib.sha256(RED).hexdigest()}.png"
    assert EMBEDDED.fullmatch(name)
    text_of_red = base64_of(RED)
    for text in (
        text_of_red,
        f"data:image/png;base64,{text_of_red}",
        f"data:;base64,{text_of_red[:40]}\n{text_of_red[40:]}",
    ):
        assert path_of(text) == name
    for path in ("a/b.png", "/9j/" + "a" * 80 + ".jpg", "https://x.org/a.png"):
        assert path_of(path) == path_of(f"file://{path}") == path


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_base64_of_a_picture_is_one_in_every_format_with_a_mark(format: str) -> None:
    content = encoded(drawn(64), format)
    assert path_of(base64_of(content)) == name_of(content)


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png,",
        "data:image/png," + "x" * 60,
        "data:image/png;base64,!" + "x" * 60,
        "data:image/png;base64," + "a" * 61,
    ],
)
def test_a_data_url_that_is_not_base64_rejects_only_its_row(text: str) -> None:
    make = form_rows("prompt_completion", None, {}, None, None)
    found = make("id", 0, json.dumps(TALK | {"image": text}).encode())
    assert isinstance(found, Reject)
    assert found.reason == "bad_picture"
    assert text[:20] in found.detail


@pytest.mark.parametrize("end", [" " * 40_000 + ".", "\n" * 40_000 + "!", "=" * 40_000])
def test_a_text_that_is_nearly_base64_takes_no_longer_than_its_length(end: str) -> None:
    text = "/9j/" + "A" * 60 + end
    begun = time.process_time()
    assert path_of(text) == text
    assert time.process_time() - begun < 1


def test_many_pictures_that_are_named_twice_take_no_longer_than_their_number() -> None:
    names = [f"{number}.png" for number in range(100_000)]
    begun = time.process_time()
    assert pictures_of(names, names[::-1]) == names[::-1]
    assert time.process_time() - begun < 2


def test_pictures_under_both_keys_are_found_in_any_letter_case(tmp_path: Path) -> None:
    made = converted_rows(tmp_path, [TALK | {"image": "a.png", "IMAGES": ["b.png"]}], kind="prompt_completion")
    assert (made.rows[0].images, made.named) == (["a.png", "b.png"], ["a.png", "b.png"])


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        (["a.png", ""], "picture 1 of 2"),
        (["a.png", None], "picture 1 of 2"),
        ([EMPTY, "a.png"], "picture 0 of 2"),
        (EMPTY, "picture 0 of 1"),
    ],
)
def test_an_empty_picture_rejects_its_row(tmp_path: Path, pictures: Any, said: str) -> None:
    """Beside others, which would be shown at the wrong tags, or without bytes and path."""
    row = TALK | {"images": pictures}
    make = form_rows("prompt_completion", None, {}, None, None)
    assert make("id", 0, json.dumps(row).encode()) == Reject("bad_picture", f"{said} is empty")


def test_null_is_no_picture_and_an_empty_one_rejects_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([TALK | {"image": cell} for cell in (None, EMPTY)]), tmp_path / "rows.parquet")
    with open_rows([tmp_path / "rows.parquet"], "train") as rows:
        make = form_rows("prompt_completion", None, {}, None, None)
        plain, empty = (make("id", number, row) for number, row in enumerate(rows))
    assert isinstance(plain, list)
    assert isinstance(empty, Reject)


ASKED = ["human: <image>\nWhat is this?"]

OTHERS = {  # by file: kind and columns; the turns of the first row; its pictures
    "40-hub-image-column.parquet": ("sharegpt", {}, [*ASKED, "gpt: A red disc."], ["red.jpg"]),
    "41-cauldron-finevision.parquet": (
        *("texts", {}),
        [
            *("human: <image>\n<image>\nWhat is the first?", "gpt: red."),
            *("human: And the second?", "gpt: green."),
        ],
        ["red.jpg", "green.png"],
    ),
    "42-trl-vision.parquet": (
        *("messages", {}),
        ["human: <image><image>Compare.", "gpt: red, green."],
        ["red.jpg", "green.png"],
    ),
    "43-hub-vqa.parquet": ("vqa", {"answer": "answer"}, [*ASKED, "gpt: red"], ["red.jpg"]),
    "44-pandas-bytes.parquet": ("vqa", {}, [*ASKED, "gpt: red"], ["red.jpg"]),
    "45-pandas-base64.csv": ("vqa", {}, [*ASKED, "gpt: red"], ["red.jpg"]),
    "06-openai-pictures-data-url.jsonl": (
        *("messages", {}),
        ["system: You name colours.", "human: What is in the picture?\n<image>", "gpt: A red disc."],
        ["red.jpg"],
    ),
    "07-openai-two-pictures.jsonl": (
        *("messages", {}),
        ["human: First: <image> second: <image>. Compare.", "gpt: red, then green."],
        ["red.jpg", "green.png"],
    ),
    "09-anthropic.jsonl": (
        *("messages", {}),
        ["system: You name colours.", "human: <image>What is this?", "gpt: A red disc."],
        ["red.jpg"],
    ),
}


@pytest.mark.parametrize("file", OTHERS)
def test_files_of_others_with_their_pictures_are_read(tmp_path: Path, file: str) -> None:
    kind, columns, talk, pictures = OTHERS[file]
    made = converted_rows(tmp_path, example_of_a_form(file), kind=kind, columns=columns)
    assert (len(made.rows), made.rejects) == (6, {})
    assert made.talks[0] == talk
    assert made.rows[0].images == [name_of(example_of_a_form(f"pictures/{name}").read_bytes()) for name in pictures]
    assert set(resolved(example_of_a_form(file), tmp_path, made.choice).values()) == {None}
    assert len(made.named) == 6


TABLES = [
    {"image": [{"bytes": RED, "path": "a.png"}, {"bytes": BLUE, "path": None}, {"bytes": RED, "path": "c.png"}]},
    {"image": [RED, BLUE, RED]},
    {"images": [[{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}], [{"bytes": RED, "path": None}], []]},
    {"images": [[RED, BLUE], [RED], None]},
]


@pytest.mark.parametrize("columns", TABLES)
def test_columns_of_pictures_become_files(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    rows = [TALK | {key: value[number] for key, value in columns.items()} for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert resolved(tmp_path / "rows.parquet", tmp_path) == {name_of(RED): None, name_of(BLUE): None}
    for content in (RED, BLUE):
        assert (tmp_path / "store" / "own" / name_of(content)).read_bytes() == content
    assert len([place for place in (tmp_path / "store" / ".embedded").rglob("*") if place.is_file()]) == 2


def test_what_is_no_picture_rejects_only_its_rows(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": cell, "path": None}} for cell in (RED, b"no picture", b"", None)]
    pq.write_table(pa.Table.from_pylist([TALK | row for row in rows]), tmp_path / "rows.parquet")
    found = resolved(tmp_path / "rows.parquet", tmp_path)
    assert list(found.values()) == [None, "unknown_format", "unknown_format"]


def test_pictures_in_the_data_that_are_all_damaged_reject_only_their_rows(tmp_path: Path) -> None:
    """Other rows may have no picture, and no root would help."""
    rows = [TALK, TALK | {"image": base64_of(RED[:90])}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert resolved(tmp_path / "rows.jsonl", tmp_path) == {name_of(RED[:90]): "undecodable"}
    rows.append(TALK | {"image": "a.png"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(VlmflowError, match=r"none of 2 pictures can be used; 'a\.png': missing"):
        resolved(tmp_path / "rows.jsonl", tmp_path)


def test_texts_of_pictures_become_files(tmp_path: Path) -> None:
    cells = [base64_of(RED), {"bytes": base64_of(BLUE), "path": None}, [f"data:image/png;base64,{base64_of(RED)}"]]
    rows = [TALK | {"image": cell} for cell in cells]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert resolved(tmp_path / "rows.jsonl", tmp_path) == {name_of(RED): None, name_of(BLUE): None}


def test_only_the_pictures_of_drawn_rows_are_written(tmp_path: Path) -> None:
    rows = [TALK | {"image": {"bytes": content, "path": None}} for content in (RED, BLUE)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (name,) = resolved(tmp_path / "rows.parquet", tmp_path, RowChoice(samples=1))
    (file,) = (place for place in (tmp_path / "store" / ".embedded").rglob("*") if place.is_file())
    assert str(file).endswith(name)


@pytest.mark.parametrize("damaged", [RED[:9], RED[:-9] + b"\0" * 9])
def test_a_damaged_file_is_written_again(tmp_path: Path, damaged: bytes) -> None:
    pq.write_table(pa.Table.from_pylist([TALK | {"image": RED}]), tmp_path / "rows.parquet")
    file = tmp_path / "store" / ".embedded" / name_of(RED)
    file.parent.mkdir(parents=True)
    file.write_bytes(damaged)
    assert resolved(tmp_path / "rows.parquet", tmp_path) == {name_of(RED): None}
    assert file.read_bytes() == RED


def test_reading_rows_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist([TALK | {"image": RED}]), tmp_path / "rows.parquet")
    assert named_paths([tmp_path / "rows.parquet"], "train") == {name_of(RED): 1}
    assert [place.name for place in tmp_path.iterdir()] == ["rows.parquet"]


def test_rows_may_name_files_that_are_called_like_pictures_in_the_data(tmp_path: Path) -> None:
    """As rows do that were published with their pictures."""
    missing = f"embedded/ab/{'a' * 64}.png"
    rows = [TALK | {"image": name} for name in (name_of(RED), missing)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "root" / name_of(RED)).parent.mkdir(parents=True)
    (tmp_path / "root" / name_of(RED)).write_bytes(RED)
    found = resolved(tmp_path / "rows.jsonl", tmp_path, roots=[str(tmp_path / "root")])
    assert found == {name_of(RED): None, missing: "missing"}
