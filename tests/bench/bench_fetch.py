"""Pictures from a zip on a server, and one by one, compared with bare clients that make the same requests.

A bare client checks only the length, retries what broke, and writes the bytes into files, unsynced; or drops them, to
show the cost of writing.

Run alone: python tests/bench/bench_fetch.py
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import urllib3

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from range_server import ZIP, VirtualZip

from vlmflow.config.tables import PictureSource
from vlmflow.core import patience
from vlmflow.fetch.archives import ranges_of, read_members
from vlmflow.fetch.fetch_pictures import FetchedPictures, PictureFetch
from vlmflow.fetch.transport import CONNECTIONS
from vlmflow.pictures.roots import PictureRoots

WANTED = 12_000
"""Scattered members of 118,287: 2.0 GB, a tenth, because FIRE's 81,000 pictures are in a dozen archives."""

LATENCY = 0.005
FAULTS = 0.01
ROUNDS = 2

REMOVED_RECENTLY = 40
"""Seconds: ext4 creates files slowly if many were removed within the last 35 (its `recently_deleted`)."""


class Request(NamedTuple):
    """A bare client's request: bytes of a path, from `start` up to `end` (exclusive)."""

    path: str
    start: int
    end: int


def bench_fetch(folder: Path) -> dict[str, float]:
    """Measure MB/s of both clients in both ways, in turns, best of two; and the bytes transferred per requested byte.

    folder: an empty folder, to be filled with 16 GB.
    """
    patience.FIRST_WAIT = 0.05  # the server's faults are retried at once
    time.sleep(REMOVED_RECENTLY)  # what ran before may have removed its files
    archive = VirtualZip()
    wanted = sorted(random.Random(2).sample(archive.names, WANTED))
    figures = {"load_average": round(os.getloadavg()[0], 2)}
    with _server() as address:
        for way, requests, place in (
            ("out_of_a_zip", _ranges(archive, wanted), {"archive": f"{address}{ZIP}"}),
            ("one_by_one", [Request(name, 0, len(archive.content(name))) for name in wanted], {"one_by_one": address}),
        ):
            source = PictureSource(members={"coco/": "{rest}"}, **place)
            found = _compare(folder, address, requests, wanted, source)
            figures |= {f"{way}:_{name}": figure for name, figure in found.items()}
    return figures


@contextmanager
def _server() -> Iterator[str]:
    """Run the server in its own process; return its address, with a slash at the end."""
    program = Path(__file__).with_name("range_server.py")
    server = subprocess.Popen(
        [sys.executable, str(program), str(LATENCY), str(FAULTS)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/"
    finally:
        server.kill()
        server.wait()


def _ranges(archive: VirtualZip, wanted: list[str]) -> list[Request]:
    members = read_members(lambda start, end: b"".join(archive.pieces(start, end)), archive.size)
    return [Request(ZIP, part.start, part.end) for part in ranges_of({name: members[name] for name in wanted})]


def _compare(folder: Path, address: str, requests: list[Request], wanted: list[str], source: PictureSource) -> dict:
    """Measure both clients in turns; return the figures of one way."""
    asked = sum(request.end - request.start for request in requests)
    bare, dropping, ours, accounts = [], [], [], []
    for _ in range(ROUNDS):
        dropping.append(_seconds(folder, lambda _: _bare(address, requests, None)))
        bare.append(_seconds(folder, lambda store: _bare(address, requests, store)))
        ours.append(_seconds(folder, lambda store: accounts.append(_ours(store, source, wanted))))
    wanted_bytes, transferred = accounts[-1].bytes_wanted, accounts[-1].bytes_transferred
    bare_rate, our_rate = asked / min(bare) / 1e6, transferred / min(ours) / 1e6
    return {
        "requests": len(requests),
        "MB_wanted": round(wanted_bytes / 1e6, 1),
        "transferred_over_wanted_(at_most_1.05)": round(transferred / wanted_bytes, 3),
        "bare_client_that_drops_all_MB_per_second": round(asked / min(dropping) / 1e6, 1),
        "bare_client_MB_per_second": round(bare_rate, 1),
        "fetch_images_MB_per_second": round(our_rate, 1),
        "fetch_images_pictures_per_second": round(len(wanted) / min(ours)),
        "ratio_(at_least_0.9)": round(our_rate / bare_rate, 3),
    }


def _seconds(folder: Path, work: Callable[[Path], object]) -> float:
    """Return the seconds of some work in an empty folder, on a disk that has nothing else to write.

    Its files remain for now, see REMOVED_RECENTLY.
    """
    store = Path(tempfile.mkdtemp(dir=folder))
    (store / "coco/train2017").mkdir(parents=True)
    os.sync()
    begun = time.perf_counter()
    work(store)
    return time.perf_counter() - begun


def _bare(address: str, requests: list[Request], store: Path | None) -> None:
    """Make all requests over as many connections as the stage; retry until each answer is complete.

    store: the folder for a file per answer, like the stage's; None drops them.
    """
    pool = urllib3.PoolManager(maxsize=CONNECTIONS, retries=False)

    def get(request: Request) -> None:
        path, start, end = request
        headers = {"range": f"bytes={start}-{end - 1}"} if path == ZIP else {}
        while True:
            try:
                answer = pool.request("GET", address + path, headers=headers)
                if answer.status in (200, 206) and len(answer.data) == end - start:
                    if store:
                        (store / "coco/train2017" / f"{path.rpartition('/')[2]}-{start}").write_bytes(answer.data)
                    return
            except urllib3.exceptions.HTTPError:
                pass

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(get, requests))


def _ours(store: Path, source: PictureSource, wanted: list[str]) -> FetchedPictures:
    """Fetch as the stage does: directory, checks, pictures on the disk. Returns the account."""
    paths = {f"coco/{name}": 1 for name in wanted}
    fetch = PictureFetch({"coco": source}, {}, store, 100_000_000, "fetch")
    account = fetch.fetch(paths, PictureRoots([str(store)], "roots"))
    if account.fetched != len(wanted):
        raise SystemExit(f"not all were fetched: {account}")
    return account


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=Path(__file__).resolve().parents[2]) as scratch:
        print(json.dumps(bench_fetch(Path(scratch)), indent=1))
