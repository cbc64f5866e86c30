"""Pictures of a zip fetched as ranges, one by one, or whole: the result, its cost, and the messages."""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archive_server import ArchiveServer, fetch, pictures_in, served_archives, zip_of
from faulty_server import breaks, html_page, ignores_range, refuses, with_headers
from vlmflow.config.tables import PictureSource
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.transport import Transport

RANDOM = Random(5)
PICTURES = {f"images/{number}.jpg": RANDOM.randbytes(RANDOM.randrange(2_000, 30_000)) for number in range(200)}
WANTED = [f"gqa/{name}" for number, name in enumerate(PICTURES) if number % 7 == 0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    with served_archives(monkeypatch) as archive_server:
        archive_server.files["gqa.zip"] = zip_of(PICTURES)
        yield archive_server


def gqa(server: ArchiveServer, **more: Any) -> dict[str, PictureSource]:
    values = {"members": {"gqa/images/": "images/{rest}"}, "archive": f"{server.base}/gqa.zip", **more}
    return {"gqa": PictureSource(**values)}


def require_wanted(store: Path, paths: list[str] = WANTED) -> None:
    """Every file there is complete, and there are no others."""
    assert pictures_in(store) == {path: PICTURES[path.removeprefix("gqa/")] for path in paths}


@pytest.mark.parametrize("form", [{}, {"deflate": True}, {"zip64": True}, {"descriptors": True, "deflate": True}])
def test_ranges_fetch_only_the_needed_bytes(server: ArchiveServer, tmp_path: Path, form: dict[str, bool]) -> None:
    server.files["gqa.zip"] = zip_of(PICTURES, **form)
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    require_wanted(tmp_path / "store")
    assert (account["wanted"], account["fetched"], account["had"]) == (29, 29, 0)
    content = sum(len(PICTURES[path.removeprefix("gqa/")]) for path in WANTED)
    assert account["bytes_wanted"] == pytest.approx(content, rel=0.01)
    assert account["bytes_transferred"] == server.sent("gqa.zip")
    tail_and_directory = 66_000 + 70 * len(PICTURES)
    assert account["bytes_transferred"] < 1.05 * content + tail_and_directory
    assert "29 pictures, ranges" in account["sources"]["gqa"]["ways"][0]


def test_nothing_is_fetched_twice(server: ArchiveServer, tmp_path: Path) -> None:
    fetch(tmp_path / "store", gqa(server), WANTED[:10])
    before = server.sent("gqa.zip")
    account = fetch(tmp_path / "store", gqa(server), WANTED[:10])
    assert (account["had"], account["fetched"]) == (10, 0)
    assert server.sent("gqa.zip") == before
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    assert (account["had"], account["fetched"]) == (10, 19)
    assert server.sent("gqa.zip") - before < 1.05 * account["bytes_wanted"]  # the directory is kept
    require_wanted(tmp_path / "store")


def test_pictures_in_a_root_are_not_fetched(server: ArchiveServer, tmp_path: Path) -> None:
    for path in WANTED[:5]:
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_bytes(b"mine")
    account = fetch(tmp_path / "store", gqa(server), WANTED, roots=[str(tmp_path / "root")])
    assert (account["had"], account["fetched"]) == (5, 24)
    require_wanted(tmp_path / "store", WANTED[5:])


def test_a_third_or_more_fetches_the_whole_archive(server: ArchiveServer, tmp_path: Path) -> None:
    paths = [f"gqa/{name}" for name in list(PICTURES)[::2]]
    md5 = hashlib.md5(server.files["gqa.zip"], usedforsecurity=False).hexdigest()
    account = fetch(tmp_path / "store", gqa(server, md5=md5), paths)
    require_wanted(tmp_path / "store", paths)
    assert "whole" in account["sources"]["gqa"]["ways"][0]
    assert not list((tmp_path / "store/.archives").rglob("*.zip*"))
    with pytest.raises(VlmflowError, match="the received file has md5"):
        fetch(tmp_path / "other", gqa(server, md5="0" * 32), paths)
    require_wanted(tmp_path / "other", [])


def test_a_whole_archive_resumes_where_it_broke(server: ArchiveServer, tmp_path: Path) -> None:
    paths = [f"gqa/{name}" for name in PICTURES]
    size = len(server.files["gqa.zip"])
    server.faults["gqa.zip"] = [None, None, breaks(size // 2), *[breaks(0)] * 20]
    with pytest.raises(VlmflowError, match="8 times in a row"):
        fetch(tmp_path / "store", gqa(server), paths)
    server.faults.clear()
    before = server.sent("gqa.zip")
    account = fetch(tmp_path / "store", gqa(server), paths)
    require_wanted(tmp_path / "store", paths)
    assert "are already here" in account["sources"]["gqa"]["ways"][0]
    assert server.sent("gqa.zip") - before <= size // 2 + 2


STATUS = [403, 404, 410]


@pytest.mark.parametrize("status", STATUS)
def test_a_source_that_refuses_loses_only_its_own_pictures(server: ArchiveServer, tmp_path: Path, status: int) -> None:
    server.always["gqa.zip"] = refuses(status)
    server.files["vg.zip"] = zip_of({"VG/1.jpg": b"picture"})
    sources = gqa(server) | {"vg": PictureSource(members={"vg/": "VG/{rest}"}, archive=f"{server.base}/vg.zip")}
    account = fetch(tmp_path / "store", sources, [*WANTED, "vg/1.jpg"])
    assert (tmp_path / "store/vg/1.jpg").read_bytes() == b"picture"
    assert account["missing"] == {"pictures": 29, "rows": 58}
    refused = account["sources"]["gqa"]["missing"]["refused"]
    assert refused["detail"] == f"127.0.0.1 answers {status}"


def test_a_page_in_place_of_an_archive(server: ArchiveServer, tmp_path: Path) -> None:
    server.always["gqa.zip"] = html_page()
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    assert "HTML page" in account["sources"]["gqa"]["missing"]["refused"]["detail"]
    require_wanted(tmp_path / "store", [])


def test_redirects_in_a_circle(server: ArchiveServer, tmp_path: Path) -> None:
    server.always["gqa.zip"] = refuses(302, Location=f"{server.base}/gqa.zip")
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    assert "form a loop" in account["sources"]["gqa"]["missing"]["refused"]["detail"]


def test_a_redirect_is_followed_once(server: ArchiveServer, tmp_path: Path) -> None:
    server.always["moved.zip"] = refuses(301, Location="/gqa.zip")
    fetch(tmp_path / "store", gqa(server, archive=f"{server.base}/moved.zip"), WANTED)
    require_wanted(tmp_path / "store")
    assert len(server.ranges_of("moved.zip")) == 1


FAULTS = {
    "reset": breaks(700, "reset"),
    "cut": breaks(700),
    "nothing": breaks(0),
    "500": refuses(500),
    "503": refuses(503, Retry_After="0"),
    "429": refuses(429, Retry_After="0"),
    "403 in the middle": refuses(403),
    "page in the middle": html_page(),
    "range ignored": ignores_range(),
    "other range": with_headers(Content_Range="bytes 0-9/4000000"),
    "longer than told": with_headers(Content_Length="100"),
    "shorter than told": with_headers(Content_Length="9999999"),
    "compressed": with_headers(Content_Encoding="gzip"),
}


STALL = pytest.param(breaks(700, "stall"), id="stall", marks=pytest.mark.lengthy)


@pytest.mark.parametrize("fault", [STALL, *(pytest.param(fault, id=name) for name, fault in FAULTS.items())])
@pytest.mark.parametrize("first", [2, 3, 6], ids=["directory", "first range", "later"])
def test_temporary_faults_lose_nothing(
    server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, first: int
) -> None:
    monkeypatch.setattr("vlmflow.core.patience.READ_TIMEOUT", 1)
    server.faults["gqa.zip"] = [*[None] * (first - 1), fault, None, fault]
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    require_wanted(tmp_path / "store")
    assert account["fetched"] == 29


def test_a_failed_server_is_an_error_after_everything_else_is_fetched(
    server: ArchiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.faults["gqa.zip"] = [None] * 8
    server.always["gqa.zip"] = refuses(500)
    server.files["vg.zip"] = zip_of({"VG/1.jpg": b"picture"})
    sources = gqa(server) | {"vg": PictureSource(members={"vg/": "VG/{rest}"}, archive=f"{server.base}/vg.zip")}
    with pytest.raises(VlmflowError, match=r"gqa.zip: 127.0.0.1 answers 500, 8 times in a row"):
        fetch(tmp_path / "store", sources, [*WANTED, "vg/1.jpg"])
    said = re.search(r"gqa: 29 pictures, 0 already here, (\d+) fetched", caplog.text)
    assert int(said[1]) == len(pictures_in(tmp_path / "store")) - 1
    assert (tmp_path / "store/vg/1.jpg").read_bytes() == b"picture"
    server.always.clear()
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    assert account["had"] >= 1
    require_wanted_with(tmp_path / "store")


def require_wanted_with(store: Path) -> None:
    (store / "vg/1.jpg").unlink()
    require_wanted(store)


def test_another_size_than_configured(server: ArchiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The missing pictures of a failed source were neither present nor fetched."""
    caplog.set_level(logging.INFO)
    with pytest.raises(VlmflowError, match="under this name, 5 are expected") as raised:
        fetch(tmp_path / "store", gqa(server, size=5), WANTED)
    assert "the configuration (picture_sources)" in raised.value.next_step
    assert "gqa: 29 pictures, 0 already here, 0 fetched" in caplog.text
    assert "gqa: 29 pictures, 58 rows: failed" in caplog.text


def test_unreachable_servers_are_waited_for_in_parallel(
    server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait begins when all sources wait; one after the other, the test would never end."""
    together = threading.Barrier(5, timeout=120)
    monkeypatch.setattr(Transport, "pause", lambda *_: together.wait())
    sources = {
        f"s{number}": PictureSource(members={f"s{number}/": "{rest}"}, archive=f"http://127.0.0.1:1/{number}.zip")
        for number in range(5)
    }
    paths = [f"s{number}/1.jpg" for number in range(5)]
    with pytest.raises(VlmflowError, match="8 times in a row") as raised:
        fetch(tmp_path / "store", gqa(server) | sources, [*paths, *WANTED])
    assert raised.value.cause.count("Could not connect") == 5
    assert raised.value.next_step.startswith("check this machine's network and proxy")
    require_wanted(tmp_path / "store")


def test_a_server_that_requests_too_long_a_wait_is_given_up(server: ArchiveServer, tmp_path: Path) -> None:
    server.always["gqa.zip"] = refuses(429, Retry_After="86400")
    with pytest.raises(VlmflowError, match="asks to wait 86,400 s"):
        fetch(tmp_path / "store", gqa(server), WANTED)


def test_an_archive_that_changes_under_way(server: ArchiveServer, tmp_path: Path) -> None:
    changed = {name: content[::-1] for name, content in PICTURES.items()}
    after: Callable[[Any], Any] = with_headers(ETag='"another"')
    server.faults["gqa.zip"] = [*[None] * 5, *[after] * 30]
    with pytest.raises(VlmflowError, match="while it was read"):
        fetch(tmp_path / "store", gqa(server), WANTED)
    server.faults.clear()
    server.files["gqa.zip"] = zip_of(changed)  # same names, sizes and places: only the ETag differs
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    assert account["fetched"] + account["had"] == 29
    kept = sum((tmp_path / "store" / path).read_bytes() == PICTURES[path.removeprefix("gqa/")] for path in WANTED)
    assert kept == account["had"]
    assert "missing" not in account["sources"]["gqa"] or not account["sources"]["gqa"]["missing"]


def test_a_server_without_ranges_gives_the_whole_file(server: ArchiveServer, tmp_path: Path) -> None:
    server.ranges = False
    size = len(server.files["gqa.zip"])
    server.faults["gqa.zip"] = [None, breaks(size // 2), breaks(size // 3)]
    account = fetch(tmp_path / "store", gqa(server), WANTED)
    require_wanted(tmp_path / "store")
    assert "does not support ranges" in account["sources"]["gqa"]["ways"][0]


def test_rows_of_no_source_and_of_one_by_hand(
    server: ArchiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sources = gqa(server) | {"sam": PictureSource(members={"sam/": "{rest}"}, by_hand="ask its owner")}
    account = fetch(tmp_path / "store", sources, [*WANTED[:3], "sam/1.jpg", "art/1.jpg", "gqa/images/none.jpg", "../x"])
    missing = {name: list(source["missing"]) for name, source in account["sources"].items()}
    assert missing == {"gqa": ["no_member"], "sam": ["by_hand"], "none": ["no_source"]}
    assert "ask its owner" in caplog.text
    assert "sam: 1 pictures, 2 rows: by_hand" in caplog.text
    assert account["missing"] == {"pictures": 3, "rows": 6}
    json.dumps(account)


def test_names_not_in_the_archive_are_reported_with_those_present(
    server: ArchiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    account = fetch(tmp_path / "store", gqa(server, members={"gqa/": "pictures/{rest}"}), WANTED)
    assert account["missing"]["pictures"] == 29
    assert "it has images/" in caplog.text
    assert "fix `members`" in caplog.text
