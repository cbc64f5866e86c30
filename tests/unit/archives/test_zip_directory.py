"""A zip's directory: packed members are found, and impossible values are refused."""

import io
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.fetch.archives import Member, content_of, kept_members, read_members, refuse_unreadable
from vlmflow.fetch.transport import Refused

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
COMMENTS = st.binary(max_size=50).filter(lambda comment: b"PK\5\6" not in comment)
"""zipfile takes a signature in the comment for that of the record; such an archive is refused, or has no members."""

MEMBERS = st.dictionaries(NAMES, st.tuples(st.binary(max_size=200), st.booleans(), st.binary(max_size=9)), max_size=8)


def zip_of(members: dict[str, tuple[bytes, bool, bytes]], comment: bytes, before: bytes) -> bytes:
    """Return a zip; members: content, whether it is deflated, and what is in its extra field."""
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


def found_in(content: bytes) -> dict[str, Member]:
    return read_members(lambda start, end: content[start:end], len(content))


def contents(archive: bytes, members: dict[str, Member]) -> dict[str, bytes]:
    """Return the unpacked content of each member."""
    return {name: bytes(content_of(memoryview(archive)[one.start : one.end], one)) for name, one in members.items()}


@given(MEMBERS, COMMENTS, st.binary(max_size=30))
def test_packed_members_are_found(members: dict, comment: bytes, before: bytes) -> None:
    archive = zip_of(members, comment, before)
    found = found_in(archive)
    assert contents(archive, found) == {
        name: content for name, (content, *_) in members.items() if not name.endswith("/")
    }
    ends = sorted(one.end for one in found.values())
    assert sorted(one.start for one in found.values())[1:] >= ends[:-1]


@given(MEMBERS, st.data())
def test_a_directory_with_wrong_bytes_is_read_or_refused(members: dict, data: st.DataObject) -> None:
    content = bytearray(zip_of(members, b"", b""))
    directory = content.find(b"PK\1\2")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(max(directory, 0), len(content) - 1))
        content[place] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0xFE, 0xFF]))
    try:
        found = found_in(bytes(content))
    except Refused:
        return
    assert all(member.start < member.end <= len(content) or member.start >= directory for member in found.values())


def zip64(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a zip in which every size and offset exceeds the old fields, as Python reads it."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 5)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    return zip_of({f"{number}.jpg": (bytes(number), True, b"") for number in range(10, 20)}, b"comment", b"")


def test_numbers_in_zip64s_field(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zip64(monkeypatch)
    assert contents(archive, found_in(archive)) == {f"{number}.jpg": bytes(number) for number in range(10, 20)}


def test_a_field_of_zip64_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(zip64(monkeypatch))
    entry = content.index(b"PK\1\2")
    (name_bytes,) = struct.unpack_from("<H", content, entry + 28)
    struct.pack_into("<H", content, entry + 46 + name_bytes + 2, 7)  # the field's own length
    with pytest.raises(Refused, match="zip64"):
        found_in(bytes(content))


def test_numbers_that_no_archive_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = bytearray(b"before it" + zip64(monkeypatch))
    field = content.rindex(b"\1\0\x18\0") + 4
    content[field : field + 24] = b"\xff" * 24
    found = kept_members(tmp_path / "kept", "key", lambda start, end: bytes(content[start:end]), len(content))
    assert list(found) == [f"{number}.jpg" for number in range(10, 20)]
    again = kept_members(tmp_path / "kept", "key", lambda start, end: pytest.fail("it is kept"), len(content))
    assert again == found
    with pytest.raises(Refused):
        refuse_unreadable(found["19.jpg"], 1 << 63)


def test_a_name_in_the_old_code_page() -> None:
    content = zip_of({"caf\u00e9.jpg": (b"", False, b"")}, b"", b"")
    content = content.replace("caf\u00e9".encode(), b"caf\x82e").replace(struct.pack("<H", 0x800), bytes(2))
    assert list(found_in(content)) == ["caf\u00e9e.jpg"]


ONE = {"1.jpg": (b"1", False, b"")}


def test_bytes_after_the_archive() -> None:
    assert list(found_in(zip_of(ONE, b"", b"") + bytes(100))) == ["1.jpg"]


@pytest.mark.parametrize("comment", [b"PK\5\6" + b"x" * 30, b"PK\5\6" + bytes(18) + b"x"], ids=["words", "a record"])
def test_a_signature_in_the_comment_rejects_only_that_archive(comment: bytes) -> None:
    """`zipfile` takes the last signature for that of the record: the archive is refused, or has no members."""
    with suppress(Refused):
        assert not found_in(zip_of(ONE, comment, b""))


@pytest.mark.parametrize("name", ["\0", "\0name"])
def test_a_member_without_a_name_affects_no_other(name: str) -> None:
    archive = bytearray(zip_of({**ONE, "x" * len(name): (b"", False, b"")}, b"", b""))
    archive = archive.replace(b"x" * len(name), name.encode())
    assert contents(archive, found_in(archive)) == {"1.jpg": b"1", "": b""}
