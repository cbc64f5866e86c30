"""A zip's directory, read by our reader and by Python's own."""

import io
import struct
import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.archives.zip_directory import directory_on_disk, kept_directory
from vlmflow.archives.zip_members import refuse_unreadable
from vlmflow.archives.zip_records import Member, read_members
from vlmflow.web.missing import Refused

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
COMMENTS = st.binary(max_size=50).filter(lambda comment: b"PK\5\6" not in comment)
"""Python's reader takes a signature within the comment for the record's own."""

MEMBERS = st.dictionaries(NAMES, st.tuples(st.binary(max_size=200), st.booleans(), st.binary(max_size=9)), max_size=8)


def zip_of(members: dict[str, tuple[bytes, bool, bytes]], comment: bytes, before: bytes) -> bytes:
    """Give a zip; members: content, whether it is deflated, and what stands in its extra field."""
    file = io.BytesIO(before)
    file.seek(len(before))
    with zipfile.ZipFile(file, "w") as archive:
        for name, (content, deflated, extra) in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            info.extra = struct.pack("<HH", 0x9999, len(extra)) + extra
            archive.writestr(info, content)
        archive.comment = comment
    return file.getvalue()


def ours(content: bytes) -> dict[str, Member]:
    return read_members(lambda start, end: content[start:end], len(content))


def pythons(content: bytes) -> dict[str, tuple]:
    """Give what Python's reader finds; a member ends where the next one begins, be it a folder, or the directory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        places = sorted({info.header_offset for info in archive.infolist()} | {archive.start_dir})
        return {
            info.filename: (
                info.header_offset,
                places[places.index(info.header_offset) + 1],
                info.compress_size,
                info.file_size,
                info.CRC,
                info.compress_type,
                info.flag_bits,
            )
            for info in archive.infolist()
            if not info.is_dir()
        }


def as_tuples(members: dict[str, Member]) -> dict[str, tuple]:
    return {name: msgspec.structs.astuple(found) for name, found in members.items()}


@given(MEMBERS, COMMENTS, st.binary(max_size=30))
def test_it_finds_what_python_finds(members: dict, comment: bytes, before: bytes) -> None:
    content = zip_of(members, comment, before)
    assert as_tuples(ours(content)) == pythons(content)


@given(MEMBERS, st.data())
def test_a_directory_with_wrong_bytes_is_read_or_refused(members: dict, data: st.DataObject) -> None:
    content = bytearray(zip_of(members, b"", b""))
    directory = content.find(b"PK\1\2")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(max(directory, 0), len(content) - 1))
        content[place] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0xFE, 0xFF]))
    try:
        found = ours(bytes(content))
    except Refused:
        return
    assert all(member.start < member.end <= len(content) or member.start >= directory for member in found.values())


def zip64(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Give a zip of which every size and place is larger than the old fields hold, as Python sees it."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 5)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    return zip_of({f"{number}.jpg": (bytes(number), True, b"") for number in range(10, 20)}, b"comment", b"")


def test_numbers_that_stand_in_zip64s_field(monkeypatch: pytest.MonkeyPatch) -> None:
    content = zip64(monkeypatch)
    found = as_tuples(ours(content))
    assert found == pythons(content)
    assert len(found) == 10


def test_a_field_of_zip64_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(zip64(monkeypatch))
    entry = content.index(b"PK\1\2")
    (name_bytes,) = struct.unpack_from("<H", content, entry + 28)
    struct.pack_into("<H", content, entry + 46 + name_bytes + 2, 7)  # the field's own length
    with pytest.raises(Refused, match="is cut"):
        ours(bytes(content))


def test_numbers_that_no_archive_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = bytearray(b"before it" + zip64(monkeypatch))
    field = content.rindex(b"\1\0\x18\0") + 4
    content[field : field + 24] = b"\xff" * 24
    found = kept_directory(tmp_path / "kept", "key", lambda start, end: bytes(content[start:end]), len(content)).members
    assert list(found) == [f"{number}.jpg" for number in range(10, 20)]
    assert directory_on_disk(tmp_path / "kept", "key").members == found
    with pytest.raises(Refused):
        refuse_unreadable(found["19.jpg"], 1 << 63)


def test_a_name_in_the_old_code_page() -> None:
    content = zip_of({"caf\u00e9.jpg": (b"", False, b"")}, b"", b"")
    content = content.replace("caf\u00e9".encode(), b"caf\x82e").replace(struct.pack("<H", 0x800), bytes(2))
    assert list(ours(content)) == ["caf\u00e9e.jpg"] == list(pythons(content))


ONE = {"1.jpg": (b"1", False, b"")}


@pytest.mark.parametrize("comment", [b"PK\5\6" + b"x" * 30, b"PK\5\6" + bytes(18) + b"x"], ids=["words", "a record"])
def test_a_signature_within_the_comment(comment: bytes) -> None:
    assert list(ours(zip_of(ONE, comment, b""))) == ["1.jpg"]


@pytest.mark.parametrize("cut", [-7, None])
def test_an_archive_within_the_archive_and_a_comment_that_is_cut(cut: int | None) -> None:
    inner = zip_of({"2.jpg": (b"2", False, b"")}, b"", b"")
    content = zip_of({**ONE, "inner.zip": (inner, False, b"")}, b"a comment", b"")
    assert list(ours(content[:cut])) == ["1.jpg", "inner.zip"]


def test_bytes_behind_the_archive() -> None:
    assert list(ours(zip_of(ONE, b"", b"") + bytes(100))) == ["1.jpg"]


@pytest.mark.parametrize("before", [b"", b"a program"])
def test_a_record_of_zip64_with_more_behind_it(monkeypatch: pytest.MonkeyPatch, before: bytes) -> None:
    """APPNOTE.TXT 4.3.14.2; where bytes come before the archive, its locator's place does not lead there."""
    content = zip64(monkeypatch)
    locator = content.rindex(b"PK\6\7")
    extended = before + content[:locator] + (b"" if before else b"more of it") + content[locator:]
    assert len(ours(extended)) == 10
