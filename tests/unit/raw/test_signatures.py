"""Files whose names say another kind than their content is."""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows

ROWS = b'{"prompt": "q", "completion": "a"}\n' * 3
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
        (gzip.compress(ROWS), "compressed (gzip)", "unpack it"),
        (bz2.compress(ROWS), "compressed (bzip2, xz", "unpack it"),
        (lzma.compress(ROWS), "compressed (bzip2, xz", "unpack it"),
        (packed("rows.jsonl"), "a ZIP archive", "unpack it"),
        (packed("[Content_Types].xml", "xl/workbook.xml"), "an Excel workbook", "save the table as CSV"),
        (written(pyarrow.feather.write_feather), "in Arrow's form", "write it as parquet"),
        (ROWS.decode().encode("utf-16"), "in UTF-16", "save the file as UTF-8"),
        (ROWS.decode().encode("utf-16-be"), "in UTF-16", "save the file as UTF-8"),
        (b"\n<!DOCTYPE html><html>", "a web page", "fetch the file again"),
    ],
    ids=("gzip", "bzip2", "xz", "zip", "excel", "arrow", "utf-16", "utf-16 big", "page"),
)
def test_what_a_file_really_is(tmp_path: Path, content: bytes, what: str, next_step: str, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content)
    with pytest.raises(VlmflowError) as error:
        open_rows([file], "train")
    said = f"its name ends with {suffix}, but it is {what}" if suffix else f": the file is {what}"
    assert said in error.value.cause
    assert next_step in error.value.next_step


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
