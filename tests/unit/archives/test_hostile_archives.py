"""Broken and lying archives: intact members are fetched, the others are counted, and nothing else is written."""

import io
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archive_server import ArchiveServer, served_archives, zip_of
from picture_fetches import MAX_BYTES, fetch, pictures_in
from vlmflow.config.tables import PictureSource
from vlmflow.fetch import archives
from vlmflow.fetch.archives import WASTE, Member, ranges_of, read_members
from vlmflow.fetch.transport import Refused

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
