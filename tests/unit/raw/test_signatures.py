"""Files whose names say another kind than their content is."""

import bz2
import gzip
import io
import lzma
import subprocess
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import copy
from vlmflow.raw.split import open_rows

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
