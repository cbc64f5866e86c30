"""Archives, whole, broken or lying, and the files written from them: intact members are fetched, others counted."""

import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archive_server import MAX_BYTES, ArchiveServer, fetch, pictures_in, served_archives, zip_of
from vlmflow.config.tables import PictureSource
from vlmflow.fetch import archives
from vlmflow.fetch.archives import WASTE, Member, content_of, kept_members, ranges_of, read_members, refuse_unreadable
from vlmflow.fetch.fetch_pictures import BUFFER_BYTES, write_picture
from vlmflow.fetch.transport import Missing, Refused
from workflow_runs import ROOT

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
COMMENTS = st.binary(max_size=50).filter(lambda comment: b"PK\5\6" not in comment)
"""zipfile takes a signature in the comment for that of the record; such an archive is refused, or has no members."""

MEMBERS = st.dictionaries(NAMES, st.tuples(st.binary(max_size=200), st.booleans(), st.binary(max_size=9)), max_size=8)


def zip_with(members: dict[str, tuple[bytes, bool, bytes]], comment: bytes, before: bytes) -> bytes:
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
    archive = zip_with(members, comment, before)
    found = found_in(archive)
    assert contents(archive, found) == {
        name: content for name, (content, *_) in members.items() if not name.endswith("/")
    }
    ends = sorted(one.end for one in found.values())
    assert sorted(one.start for one in found.values())[1:] >= ends[:-1]


@given(MEMBERS, st.data())
def test_a_directory_with_wrong_bytes_is_read_or_refused(members: dict, data: st.DataObject) -> None:
    content = bytearray(zip_with(members, b"", b""))
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
    return zip_with({f"{number}.jpg": (bytes(number), True, b"") for number in range(10, 20)}, b"comment", b"")


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
    content = zip_with({"caf\u00e9.jpg": (b"", False, b"")}, b"", b"")
    content = content.replace("caf\u00e9".encode(), b"caf\x82e").replace(struct.pack("<H", 0x800), bytes(2))
    assert list(found_in(content)) == ["caf\u00e9e.jpg"]


ONE = {"1.jpg": (b"1", False, b"")}


def test_bytes_after_the_archive() -> None:
    assert list(found_in(zip_with(ONE, b"", b"") + bytes(100))) == ["1.jpg"]


@pytest.mark.parametrize("comment", [b"PK\5\6" + b"x" * 30, b"PK\5\6" + bytes(18) + b"x"], ids=["words", "a record"])
def test_a_signature_in_the_comment_rejects_only_that_archive(comment: bytes) -> None:
    """`zipfile` takes the last signature for that of the record: the archive is refused, or has no members."""
    with suppress(Refused):
        assert not found_in(zip_with(ONE, comment, b""))


@pytest.mark.parametrize("name", ["\0", "\0name"])
def test_a_member_without_a_name_affects_no_other(name: str) -> None:
    archive = bytearray(zip_with({**ONE, "x" * len(name): (b"", False, b"")}, b"", b""))
    archive = archive.replace(b"x" * len(name), name.encode())
    assert contents(archive, found_in(archive)) == {"1.jpg": b"1", "": b""}


PICTURES = {f"p/{number}.jpg": Random(number).randbytes(3_000) for number in range(40)}
WANTED = ["x/1.jpg", "x/2.jpg", "x/30.jpg"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    with served_archives(monkeypatch) as archive_server:
        yield archive_server


def fetch_from(
    server: ArchiveServer, tmp_path: Path, content: bytes, paths: list[str] = WANTED
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the fetched files, and the missing ones by reason."""
    server.files["x.zip"] = content
    source = PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/x.zip")
    account = fetch(tmp_path / "store", {"x": source}, paths)
    assert account["wanted"] == len(paths)
    return pictures_in(tmp_path / "store"), account["sources"]["x"]["missing"]


def broken(change: Callable[[bytearray], object]) -> bytes:
    content = bytearray(zip_of(PICTURES))
    change(content)
    return bytes(content)


def end_record(content: bytearray) -> int:
    return content.rindex(b"PK\x05\x06")


BROKEN = {
    "not a zip": lambda content: content.__setitem__(slice(None), b"not a zip at all" * 500),
    "empty": lambda content: content.clear(),
    "cut": lambda content: content.__delitem__(slice(len(content) // 2, None)),
    "directory overwritten": lambda content: content.__setitem__(
        slice(content.index(b"PK\x01\x02"), content.index(b"PK\x01\x02") + 400), bytes(400)
    ),
    "directory beyond the end": lambda content: struct.pack_into("<I", content, end_record(content) + 12, 0x7FFFFFFF),
    "directory before the start": lambda content: struct.pack_into("<I", content, end_record(content) + 16, 0xFFFFFFF0),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_directory(server: ArchiveServer, tmp_path: Path, change: Callable[[bytearray], object]) -> None:
    found, missing = fetch_from(server, tmp_path, broken(change))
    assert not found
    assert set(missing) <= {"unreadable", "refused", "damaged"}
    assert sum(cost["pictures"] for cost in missing.values()) == 3


LOCATOR, RECORD = b"PK\x06\x07", b"PK\x06\x06"

BROKEN_64: dict[str, Callable[[bytearray], object]] = {
    "no locator": lambda content: content.__setitem__(content.rindex(LOCATOR), 0),
    "locator beyond the end": lambda content: struct.pack_into("<Q", content, content.rindex(LOCATOR) + 8, 1 << 62),
    "locator to another place": lambda content: struct.pack_into("<Q", content, content.rindex(LOCATOR) + 8, 12_345),
    "locator of two disks": lambda content: struct.pack_into("<I", content, content.rindex(LOCATOR) + 16, 2),
    "no record": lambda content: content.__setitem__(content.rindex(RECORD), 0),
    "directory of 2^62 bytes": lambda content: struct.pack_into("<Q", content, content.rindex(RECORD) + 40, 1 << 62),
    "directory at 2^62": lambda content: struct.pack_into("<Q", content, content.rindex(RECORD) + 48, 1 << 62),
    "directory elsewhere": lambda content: struct.pack_into("<Q", content, content.rindex(RECORD) + 48, 12_345),
    "cut in the record": lambda content: content.__delitem__(
        slice(content.rindex(RECORD) + 30, content.rindex(LOCATOR))
    ),
}


def zip_of_many(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """Return a zip with zip64's record and locator, which the old end record refers to, as with many members."""
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)
    content = bytearray(zip_of(PICTURES))
    struct.pack_into("<HHII", content, end_record(content) + 8, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return content


def test_a_zip64_directory(server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, missing = fetch_from(server, tmp_path, bytes(zip_of_many(monkeypatch)))
    assert (set(found), missing) == (set(WANTED), {})


@pytest.mark.parametrize("change", BROKEN_64.values(), ids=BROKEN_64)
def test_a_broken_zip64_directory(
    server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytearray], object]
) -> None:
    content = zip_of_many(monkeypatch)
    change(content)
    found, missing = fetch_from(server, tmp_path, bytes(content))
    if found:  # the record is before the locator: it is read there, wherever that one points
        assert found == {path: PICTURES[f"p/{path[2:]}"] for path in WANTED}
        assert change in (BROKEN_64["locator beyond the end"], BROKEN_64["locator to another place"])
        return
    assert set(missing) <= {"unreadable", "refused", "damaged"}
    assert sum(cost["pictures"] for cost in missing.values()) == 3


def test_a_directory_that_claims_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LARGEST_DIRECTORY", 1000)
    content = zip_of(PICTURES)
    asked: list[int] = []

    def read(start: int, end: int) -> bytes:
        asked.append(end - start)
        return content[start:end]

    with pytest.raises(Refused, match="it claims"):
        read_members(read, len(content))
    assert max(asked) <= archives.TAIL_BYTES


def test_names_that_lead_elsewhere(server: ArchiveServer, tmp_path: Path) -> None:
    """Members are found by name; a member's own name never becomes a path."""
    hostile = {"../evil.jpg": b"evil", "/etc/evil.jpg": b"evil", "p/../../evil.jpg": b"evil"}
    rows = ["x/1.jpg", "x/../../evil.jpg", "/etc/evil.jpg", "../evil.jpg"]
    server.files["x.zip"] = zip_of(hostile | PICTURES)
    source = PictureSource(members={"x/": "p/{rest}", "": "{rest}"}, archive=f"{server.base}/x.zip")
    fetch(tmp_path / "store", {"x": source}, rows)
    assert pictures_in(tmp_path / "store") == {"x/1.jpg": PICTURES["p/1.jpg"]}
    assert not list(tmp_path.rglob("evil*"))


def directory_entry(content: bytearray, name: str) -> int:
    return [found.start() for found in re.finditer(re.escape(name.encode()), content)][-1] - 46


def test_a_member_whose_size_lies(server: ArchiveServer, tmp_path: Path) -> None:
    """A bomb: it unpacks to a thousand times the size in the directory, and unpacking stops."""
    content = bytearray(zip_of({**PICTURES, "p/bomb.jpg": bytes(10 * MAX_BYTES)}, deflate=True))
    struct.pack_into("<I", content, directory_entry(content, "p/bomb.jpg") + 24, 5_000)
    found, missing = fetch_from(server, tmp_path, bytes(content), ["x/bomb.jpg", *WANTED])
    assert set(found) == set(WANTED)
    assert missing["damaged"]["pictures"] == 1
    assert "unpacked size differs" in missing["damaged"]["detail"]


def test_a_member_that_says_it_is_a_bomb(server: ArchiveServer, tmp_path: Path) -> None:
    content = zip_of({**PICTURES, "p/bomb.jpg": bytes(10 * MAX_BYTES)}, deflate=True)
    found, missing = fetch_from(server, tmp_path, content, ["x/bomb.jpg", *WANTED])
    assert set(found) == set(WANTED)
    assert missing["too_large"]["detail"] == "10,000,000 bytes, the limit is 1,000,000"


@pytest.mark.parametrize(
    ("field", "form", "value", "reason"),
    [
        pytest.param(16, "<I", 12345, "damaged", id="CRC"),
        pytest.param(20, "<I", 900_000, "damaged", id="packed size over other members"),
        pytest.param(10, "<H", 99, "unreadable", id="unknown method"),
        pytest.param(8, "<H", 1, "unreadable", id="encrypted"),
        pytest.param(42, "<I", 17, "damaged", id="place within another member"),
        pytest.param(42, "<I", 0x7FFFFFF0, "damaged", id="place beyond the end"),
    ],
)
def test_a_member_that_is_not_what_the_directory_says(
    server: ArchiveServer, tmp_path: Path, field: int, form: str, value: int, reason: str
) -> None:
    content = bytearray(zip_of(PICTURES))
    struct.pack_into(form, content, directory_entry(content, "p/2.jpg") + field, value)
    found, missing = fetch_from(server, tmp_path, bytes(content))
    assert set(found) == {"x/1.jpg", "x/30.jpg"}
    assert {reason: cost["pictures"] for reason, cost in missing.items()} == {reason: 1}


def test_damaged_bytes_are_counted_and_the_others_come(server: ArchiveServer, tmp_path: Path) -> None:
    content = bytearray(zip_of(PICTURES))
    place = content.index(PICTURES["p/2.jpg"])
    content[place + 100] ^= 1
    found, missing = fetch_from(server, tmp_path, bytes(content))
    assert found == {path: PICTURES[f"p/{path[2:]}"] for path in ("x/1.jpg", "x/30.jpg")}
    assert missing["damaged"]["example"] == "x/2.jpg"


def test_of_two_members_with_one_name_the_last_counts(server: ArchiveServer, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        content = zip_twice({"p/1.jpg": b"old" * 99}, PICTURES)
    found, _ = fetch_from(server, tmp_path, content)
    assert found["x/1.jpg"] == PICTURES["p/1.jpg"]


def zip_twice(first: dict[str, bytes], second: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in [*first.items(), *second.items()]:
            archive.writestr(name, content)
    return file.getvalue()


def test_a_path_that_runs_through_another_picture(server: ArchiveServer, tmp_path: Path) -> None:
    content = zip_of({**PICTURES, "p/1.jpg/deep.jpg": b"deep"})
    found, missing = fetch_from(server, tmp_path, content, ["x/1.jpg", "x/1.jpg/deep.jpg"])
    assert len(found) == 1
    assert missing["name_conflict"]["pictures"] == 1


def member(start: int, end: int) -> Member:
    return Member(start, end, end - start - 50, end - start - 50, 0, 0, 0)


def test_ranges_close_the_smallest_gaps_and_waste_little() -> None:
    random = Random(3)
    members, place = {}, 0
    for number in range(5_000):
        size = random.randrange(1_000, 20_000)
        if number % 3:
            members[str(number)] = member(place, place + size)
        place += size if random.random() < 0.9 else size + 200
    ranges = ranges_of(members)
    assert [name for part in ranges for name in part.names] == list(members)
    covered = sum(part.end - part.start for part in ranges)
    wanted = sum(found.end - found.start for found in members.values())
    assert wanted <= covered <= (1 + WASTE) * wanted
    assert len(ranges) < len(members)
    assert all(
        part.start <= members[name].start and members[name].end <= part.end for part in ranges for name in part.names
    )


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one on a file system that may not support O_DIRECT."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            yield Path(place)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES - 4097])
def test_every_size_is_written_completely(folder: Path, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    assert write_picture(folder / "new" / "a.jpg", content) is None
    assert (folder / "new" / "a.jpg").read_bytes() == content
    assert [file.name for file in (folder / "new").iterdir()] == ["a.jpg"]


def test_the_rest_of_a_killed_fetch_is_overwritten(folder: Path) -> None:
    (folder / "a.jpg.part").write_bytes(b"half of a picture that was longer" * 1_000)
    assert write_picture(folder / "a.jpg", b"picture") is None
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("a.jpg", b"picture")]


def test_a_link_is_not_followed(folder: Path) -> None:
    (folder / "other").write_bytes(b"other")
    (folder / "a.jpg.part").symlink_to(folder / "other")
    with pytest.raises(OSError, match=r"a\.jpg"):
        write_picture(folder / "a.jpg", b"picture")
    assert (folder / "other").read_bytes() == b"other"


def test_a_folder_in_place_of_a_file_is_reported(folder: Path) -> None:
    (folder / "a.jpg").mkdir()
    assert isinstance(write_picture(folder / "a.jpg", b"picture"), Missing)
    (folder / "b.jpg").write_bytes(b"picture")
    assert isinstance(write_picture(folder / "b.jpg" / "c.jpg", b"picture"), Missing)
    assert sorted(file.name for file in folder.iterdir()) == ["a.jpg", "b.jpg"]


WITHOUT_A_WAY_PAST_THE_CACHE = """
import os, sys
from pathlib import Path
from vlmflow.fetch.fetch_pictures import write_picture
folder, content = Path(sys.argv[1]), os.urandom(5_000)
try:
    os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
except OSError as error:
    print(error.strerror)
assert write_picture(folder / "new" / "a.jpg", content) is None
assert (folder / "new" / "a.jpg").read_bytes() == content
print("kept")
"""


def test_a_file_system_without_o_direct_is_written_through_the_cache(tmp_path: Path) -> None:
    """Such as ramfs, in its own mount namespace."""
    mounted = 'mount -t ramfs ramfs "$0" && exec "$@"'
    program = [sys.executable, "-c", WITHOUT_A_WAY_PAST_THE_CACHE, tmp_path]
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", mounted, tmp_path, *program]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "Invalid argument\nkept\n", done.stderr
