from pathlib import Path

import msgspec
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import PictureEntry, read_picture_manifest

LINE = msgspec.json.encode(PictureEntry(path="a.jpg", rows=2, reason="missing", detail="nowhere"))


def test_entries_are_read_in_order(tmp_path: Path):
    manifest = tmp_path / "train.jsonl"
    manifest.write_bytes(LINE + b"\n" + LINE.replace(b"a.jpg", b"b.jpg") + b"\n")
    entries = list(read_picture_manifest(manifest))
    assert [entry.path for entry in entries] == ["a.jpg", "b.jpg"]
    assert (entries[0].rows, entries[0].reason, entries[0].name) == (2, "missing", None)


@pytest.mark.parametrize("line", [b"{", b"", b"[]", b'{"path": "a.jpg"}', b'{"path": 1, "rows": 1}', b'"\xff"'])
def test_a_damaged_manifest_names_file_and_line(tmp_path: Path, line: bytes):
    manifest = tmp_path / "train.jsonl"
    manifest.write_bytes(LINE + b"\n" + line + b"\n")
    with pytest.raises(VlmflowError, match=rf"{manifest}, line 2: .*\n.*remove it"):
        list(read_picture_manifest(manifest))


def test_a_missing_manifest_is_named(tmp_path: Path):
    with pytest.raises(VlmflowError, match=r"nowhere\.jsonl"):
        list(read_picture_manifest(tmp_path / "nowhere.jsonl"))
