"""COCO by number, pictures one by one, tar and parquet files, archives on the hub."""

import io
import logging
import tarfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from archive_server import MAX_BYTES, ArchiveServer, fetch, pictures_in, served_archives, strong_etag, zip_of
from faulty_server import breaks, html_page, refuses
from hub_server import REVISION, served_hub, sha256
from vlmflow.config.tables import PINS, PictureSource, Pin, read_pins, read_sources
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.picture_source import Places, ways_to
from vlmflow.fetch.source_fetch import FetchProgress
from vlmflow.pictures.roots import PictureRoots

TRAIN = {f"train2017/{number:012}.jpg": Random(number).randbytes(4_000) for number in range(1, 60, 2)}
VAL = {f"val2017/{number:012}.jpg": Random(number).randbytes(4_000) for number in range(2, 10, 2)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    with served_archives(monkeypatch) as archive_server:
        archive_server.files |= TRAIN | VAL
        archive_server.files["zips/train2017.zip"] = zip_of(TRAIN)
        archive_server.files["zips/val2017.zip"] = zip_of(VAL)
        yield archive_server


def coco(server: ArchiveServer, **more: Any) -> dict[str, PictureSource]:
    """The table's own rows at another server, as for a mirror."""
    over = {}
    for split in ("train", "val"):
        archive = f"zips/{split}2017.zip"
        over[f"coco-{split}2017"] = PictureSource(
            archive=f"{server.base}/{archive}", one_by_one=f"{server.base}/", size=len(server.files[archive]), **more
        )
    sources = read_sources(over)
    # The real zips have many more members than these.
    return {name: source.model_copy(update={"md5": None}) for name, source in sources.items()}


def test_coco_by_number_one_by_one(server: ArchiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Train2014's names are found in train2017 or val2017, and one picture is fetched once."""
    caplog.set_level(logging.INFO)
    paths = [
        "coco/train2017/000000000001.jpg",
        "coco/train2014/000000000001.jpg",
        "coco/train2014/000000000003.jpg",
        "coco/val2014/COCO_val2014_000000000005.jpg",
        "coco/train2014/000000000002.jpg",
        "coco/train2014/000000000099.jpg",
    ]
    account = fetch(tmp_path / "store", coco(server), paths)
    stored = {name: (TRAIN | VAL)[name.removeprefix("coco/")] for name in pictures_in(tmp_path / "store")}
    assert pictures_in(tmp_path / "store") == stored
    assert sorted(int(Path(name).stem) for name in stored) == [1, 2, 3, 5]
    assert (account["wanted"], account["fetched"], account["missing"]["pictures"]) == (6, 5, 1)
    assert "one by one" in caplog.text
    assert "ranges would take about" in caplog.text
    assert server.ranges_of("zips/train2017.zip") == []
    assert len(server.ranges_of("train2017/000000000001.jpg")) == 1
    roots = PictureRoots([str(tmp_path / "store")], "roots")
    found = [roots.locate(path) for path in paths[:5]]
    assert [Path(place.file).read_bytes() for place in found] == [Random(n).randbytes(4_000) for n in (1, 1, 3, 5, 2)]


stalls = pytest.param(breaks(10, "stall"), marks=pytest.mark.lengthy)


@pytest.mark.parametrize("fault", [breaks(100), breaks(100, "reset"), stalls, refuses(503)])
def test_single_pictures_through_faults(
    server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr("vlmflow.core.patience.READ_TIMEOUT", 1)
    server.faults["train2017/000000000001.jpg"] = [fault, fault]
    account = fetch(tmp_path / "store", coco(server), ["coco/train2017/000000000001.jpg"])
    assert account["fetched"] == 1
    assert pictures_in(tmp_path / "store").popitem()[1] == TRAIN["train2017/000000000001.jpg"]


def test_a_single_picture_that_changes_in_its_middle(server: ArchiveServer, tmp_path: Path) -> None:
    """It is read again from its first byte."""
    name = "train2017/000000000001.jpg"
    server.faults[name] = [server.change(name, TRAIN[name][::-1], 2_000)]
    fetch(tmp_path / "store", coco(server), [f"coco/{name}"])
    assert pictures_in(tmp_path / "store") == {f"coco/{name}": TRAIN[name][::-1]}


@pytest.mark.parametrize("fault", [refuses(404), refuses(403), html_page()])
def test_a_single_picture_that_is_refused_is_counted(server: ArchiveServer, tmp_path: Path, fault: Any) -> None:
    server.always["train2017/000000000001.jpg"] = fault
    paths = ["coco/train2017/000000000001.jpg", "coco/train2017/000000000003.jpg"]
    account = fetch(tmp_path / "store", coco(server), paths)
    assert (account["fetched"], account["missing"]) == (1, {"pictures": 1, "rows": 2})


def test_the_zip_is_used_if_single_pictures_are_refused(server: ArchiveServer, tmp_path: Path) -> None:
    for name in TRAIN:
        server.always[name] = refuses(403)
    account = fetch(tmp_path / "store", coco(server), ["coco/train2017/000000000001.jpg"])
    assert account["fetched"] == 1
    assert server.sent("zips/train2017.zip")


def test_unknown_sizes_are_not_reported(
    server: ArchiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is a sum that includes them; a source without an archive is like any other."""
    server.files["x.zip"] = zip_of({"p/1.jpg": bytes(400_000)})
    server.files["y/1.jpg"] = bytes(600_000)
    sources = {"x": PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/x.zip")}
    fetch(tmp_path / "known", sources, ["x/1.jpg"])
    assert "test: 0.5 of 0.5 MB · " in capsys.readouterr().err  # includes the end of the zip, with its directory
    sources["y"] = PictureSource(members={"y/": "{rest}"}, one_by_one=f"{server.base}/y/")
    account = fetch(tmp_path / "store", sources, ["x/1.jpg", "y/1.jpg"])
    assert account["sources"]["y"]["ways"] == ["1 picture, one by one, of unknown size: the source has no archive"]
    said = capsys.readouterr().err
    assert "test: 1.1 MB · " in said
    assert "2 of 2 pictures" in said


def test_an_exceeded_estimate_is_no_longer_shown() -> None:
    progress = FetchProgress("test")
    progress.total = 1_000_000
    progress.advance(900_000)
    assert "0.9 of 1.0 MB" in progress.line(1)
    progress.advance(200_000)
    assert progress.line(1).startswith("test: 1.1 MB · ")


def test_the_cheaper_way_is_chosen_and_reported() -> None:
    table = read_sources({})
    train = table["coco-train2017"]
    few = [f"train2017/{number:012}.jpg" for number in range(100)]
    ways = ways_to(train, few, directory_is_here=False)
    assert [way.name for way in ways] == ["one by one", "ranges"]
    assert ways[0].bytes == pytest.approx(100 * (train.size / train.pictures + 700), rel=0.01)
    assert "ranges would take about 2" in ways[0].why
    many = [f"train2017/{number:012}.jpg" for number in range(30_000)]
    assert [way.name for way in ways_to(train, many, directory_is_here=True)] == ["ranges", "one by one"]
    most = [f"train2017/{number:012}.jpg" for number in range(40_000)]
    assert ways_to(train, most, directory_is_here=False)[0].name == "whole"


def test_every_known_prefix_has_a_source() -> None:
    """Every path prefix of FIRE and Volcano has a source, fetched or by hand."""
    table = read_sources({})
    places = Places(table)
    for path, source in {
        "coco/train2017/000000151694.jpg": "coco-train2017",
        "coco/train2014/000000151694.jpg": "coco-train2017",
        "coco/val2014/000000151694.jpg": "coco-train2017",
        "gqa/images/n23181.jpg": "gqa",
        "textvqa/train_val_images/train_images/a.jpg": "textvqa",
        "textvqa/train_images/a.jpg": "textvqa",
        "vg/VG_100K/1.jpg": "vg-1",
        "vg/VG_100K_2/1.jpg": "vg-2",
        "ocr_vqa/images/1.jpg": "ocr_vqa",
        "docvqa/documents/x.png": "vqa-collection",
        "geoqa+/images/1.png": "vqa-collection",
        "allava_vflan/images/x.jpg": "allava-vflan",
        "scienceqa/images/test/1/image.png": "scienceqa",
        "images/7.jpg": "mathvista",
        "web-celebrity/images/x.jpg": "web",
    }.items():
        assert places.of(path)[0].source == source, path
    member = places.of("textvqa/train_val_images/train_images/a.jpg")[0].member
    assert member == "train_images/a.jpg"
    pins = read_pins(PINS)
    assert {source.archive for source in table.values() if (source.archive or "").startswith("hf://")} <= set(pins)


def tar_of(members: dict[str, bytes], packed: bool = True) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz" if packed else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("p/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return file.getvalue()


PICTURES = {f"p/{number}.jpg": Random(number).randbytes(3_000) for number in range(40)}


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tar"])
def test_a_tar_is_read_once(server: ArchiveServer, tmp_path: Path, name: str) -> None:
    hostile = {"../evil.jpg": b"evil", "p/large.jpg": bytes(MAX_BYTES + 1)}
    server.files[name] = tar_of({f"./{key}": value for key, value in (PICTURES | hostile).items()}, name.endswith("gz"))
    server.faults[name] = [None, breaks(1_000, "reset")]
    source = PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/{name}")
    rows = ["x/1.jpg", "x/2.jpg", "x/none.jpg", "x/link.jpg", "x/large.jpg"]
    account = fetch(tmp_path / "store", {"x": source}, rows)
    assert pictures_in(tmp_path / "store") == {f"x/{n}.jpg": PICTURES[f"p/{n}.jpg"] for n in (1, 2)}
    missing = account["sources"]["x"]["missing"]
    assert {reason: cost["pictures"] for reason, cost in missing.items()} == {"no_member": 2, "too_large": 1}
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
@pytest.mark.parametrize("etag", [strong_etag, lambda content: f"W/{strong_etag(content)}"], ids=["strong", "weak"])
def test_a_whole_archive_that_changes_in_its_middle(
    server: ArchiveServer, tmp_path: Path, name: str, ranges: bool, etag: Callable[[bytes], str]
) -> None:
    """Two archives of the same size and name, but another ETag: no picture mixes both, and the next run gets one."""
    server.etag_of = etag
    changed = {key: content[::-1] for key, content in PICTURES.items()}
    old, new = (zip_of(each) if name == "x.zip" else tar_of(each, name != "x.tar") for each in (PICTURES, changed))
    server.ranges = ranges
    server.files[name] = old
    directory = [None] if name == "x.zip" and ranges else []
    server.faults[name] = [None, *directory, server.change(name, new, len(old) // 2)]
    source = {"x": PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/{name}")}
    paths = [f"x/{number}.jpg" for number in range(40)]
    with pytest.raises(VlmflowError, match=f"{name} changed at 127.0.0.1 while it was read"):
        fetch(tmp_path / "store", source, paths)
    assert server.sent(name) >= len(old) // 2
    assert pictures_in(tmp_path / "store") == {}
    assert len(list((tmp_path / "store/.archives/x").iterdir())) == 1
    assert fetch(tmp_path / "store", source, paths)["fetched"] == 40
    assert not list((tmp_path / "store/.archives/x").iterdir())
    assert pictures_in(tmp_path / "store") == {path: changed[f"p/{path[2:]}"] for path in paths}


def pax_bomb() -> bytes:
    records = b"9000000 vlmflow.note=".ljust(9_000_000 - 1, b"x") + b"\n"
    header = tarfile.TarInfo("note")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    return header.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512) + tar_of(PICTURES, packed=False)


def sparse() -> bytes:
    header = tarfile.TarInfo("p/1.jpg")
    header.type = tarfile.GNUTYPE_SPARSE
    return header.tobuf(tarfile.GNU_FORMAT) + tar_of(PICTURES, packed=False)


def claims(size: int) -> Callable[[], bytes]:
    """A tar of 1 KB whose first file claims a size; tarfile would look for its end block by block."""
    header = tarfile.TarInfo("other")
    header.size = size
    return lambda: header.tobuf(tarfile.GNU_FORMAT) + bytes(512)


def long_names() -> bytes:
    """Two thousand headers in a row for one file's name; tarfile calls itself for each."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2
    return (header.tobuf(tarfile.GNU_FORMAT) + b"n".ljust(512, b"\0")) * 2_000 + tar_of(PICTURES, packed=False)


@pytest.mark.parametrize("content", [pax_bomb, sparse, claims(1 << 36), claims(1 << 62), long_names])
def test_a_tar_whose_headers_claim_too_much_is_refused(
    server: ArchiveServer, tmp_path: Path, content: Callable[[], bytes]
) -> None:
    server.files["x.tar"] = content()
    source = PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/x.tar")
    account = fetch(tmp_path / "store", {"x": source}, ["x/1.jpg"])
    assert list(account["sources"]["x"]["missing"]) == ["unreadable"]


def test_a_broken_tar_gives_what_came_before_the_break(server: ArchiveServer, tmp_path: Path) -> None:
    server.files["x.tar"] = tar_of(PICTURES, packed=False)[:30_000]
    source = PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/x.tar")
    account = fetch(tmp_path / "store", {"x": source}, ["x/1.jpg", "x/39.jpg"])
    assert set(pictures_in(tmp_path / "store")) == {"x/1.jpg"}
    assert set(account["sources"]["x"]["missing"]) == {"unreadable"}


@pytest.mark.parametrize("name_column", [None, "file"])
def test_pictures_inside_parquet(server: ArchiveServer, tmp_path: Path, name_column: str | None) -> None:
    pictures = [{"bytes": content, "path": name} for name, content in PICTURES.items()]
    table = pyarrow.table({"image": pictures, "file": list(PICTURES), "text": ["x"] * len(PICTURES)})
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=7)
    server.files["x.parquet"] = file.getvalue()
    values = {"members": {"x/": "p/{rest}"}, "archive": f"{server.base}/x.parquet", "name_column": name_column}
    fetch(tmp_path / "store", {"x": PictureSource(**values)}, ["x/1.jpg", "x/2.jpg"])
    assert pictures_in(tmp_path / "store") == {f"x/{n}.jpg": PICTURES[f"p/{n}.jpg"] for n in (1, 2)}
    account = fetch(tmp_path / "other", {"x": PictureSource(**values, picture_column="photo")}, ["x/1.jpg"])
    detail = account["sources"]["x"]["missing"]["unreadable"]["detail"]
    assert detail == "no column photo; the file has image, file, text"
    server.files["x.parquet"] = b"PAR1" + bytes(100)
    account = fetch(tmp_path / "broken", {"x": PictureSource(**values)}, ["x/1.jpg"])
    assert set(account["sources"]["x"]["missing"]) == {"unreadable"}


HUB_ZIP = "hf://datasets/o/d/x.zip"


def test_an_archive_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ArchiveServer) -> None:
    """By its pinned commit; its storage's address is signed for a short time, and requested again when it expires."""
    source = {"x": PictureSource(members={"x/": "p/{rest}"}, archive=HUB_ZIP)}
    with served_hub(monkeypatch) as hub:
        content = zip_of(PICTURES)
        hub.add("datasets/o/d", {"x.zip": content})
        with pytest.raises(VlmflowError, match=r"is not in pins.yaml"):
            fetch(tmp_path / "store", source, ["x/1.jpg"])
        with pytest.raises(VlmflowError, match="has no revision"):
            fetch(tmp_path / "store", source, ["x/1.jpg"], pins={HUB_ZIP: Pin()})
        assert not hub.requests
        with pytest.raises(VlmflowError, match=f"size is {len(content)} on the hub, 5 in pins.yaml"):
            fetch(tmp_path / "store", source, ["x/1.jpg"], pins={HUB_ZIP: Pin(revision=REVISION, size=5)})
        pin = Pin(revision=REVISION, size=len(content), sha256=sha256(content))
        hub.faults[("bytes", "x.zip")] = [lambda answer: answer, refuses(403)]
        account = fetch(tmp_path / "store", source, ["x/1.jpg", "x/9.jpg"], pins={HUB_ZIP: pin})
        assert account["fetched"] == 2
        assert not hub.leaked
        everything = [f"x/{number}.jpg" for number in range(40)]
        account = fetch(tmp_path / "store", source, everything, pins={HUB_ZIP: pin})
        assert (account["had"], account["fetched"]) == (2, 38)
        assert "whole" in account["sources"]["x"]["ways"][0]
    assert pictures_in(tmp_path / "store") == {f"x/{n}.jpg": PICTURES[f"p/{n}.jpg"] for n in range(40)}


LATER = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wall clock jump weeks forward and back at every reading."""
    jumps = cycle((1e6, -2e6, 3e6))
    monkeypatch.setattr("time.time", lambda: 1e9 + next(jumps))


@pytest.mark.usefixtures("jumping_clock")
def test_a_clock_that_jumps(server: ArchiveServer, tmp_path: Path) -> None:
    """Waits and rates use a monotonic clock; a date to wait for uses the server's clock."""
    server.faults["train2017/000000000001.jpg"] = [refuses(503, **LATER), refuses(429, **LATER)]
    account = fetch(tmp_path / "store", coco(server), ["coco/train2017/000000000001.jpg"])
    assert account["fetched"] == 1


@pytest.mark.usefixtures("jumping_clock")
@pytest.mark.parametrize("wanted", [3, 40], ids=["ranges", "whole"])
def test_a_clock_that_jumps_while_a_zip_is_read(server: ArchiveServer, tmp_path: Path, wanted: int) -> None:
    server.files["x.zip"] = zip_of(PICTURES)
    later = [refuses(503, **LATER), refuses(429, **LATER), breaks(500, "reset")]
    server.faults["x.zip"] = [*later, None, *later, None, *later]
    source = PictureSource(members={"x/": "p/{rest}"}, archive=f"{server.base}/x.zip")
    account = fetch(tmp_path / "store", {"x": source}, [f"x/{number}.jpg" for number in range(wanted)])
    assert account["fetched"] == wanted
    assert account["sources"]["x"]["ways"][0].count("whole") == (wanted == 40)
    assert pictures_in(tmp_path / "store") == {f"x/{n}.jpg": PICTURES[f"p/{n}.jpg"] for n in range(wanted)}
