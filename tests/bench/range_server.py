"""A server of ranges of a virtual zip, and of its members by name, with latency and faults and little work of its own.

python tests/bench/range_server.py LATENCY FAULT_SHARE   (prints its port)

The zip has COCO's real size: its bytes are generated on request.
"""

import bisect
import io
import random
import re
import socket
import struct
import sys
import threading
import time
import zipfile
import zlib
from contextlib import suppress
from functools import cached_property

MEMBERS = 118_287
SMALLEST, LARGEST = 100_000, 226_000
"""Bytes of a member. The zip has the number of members of COCO's train2017, and their mean size, 163 KB."""

CUTS = 1_000
"""The number of different contents: each member is one of these pieces of a block of noise, with known CRCs."""


class VirtualZip:
    """It has the same bytes in every process.

    names: of its members, in order. size: bytes of the whole zip.
    """

    def __init__(self) -> None:
        chance = random.Random(1)
        noise = memoryview(chance.randbytes(16 << 20))
        cuts = []
        for _ in range(CUTS):
            start = chance.randrange(len(noise) - LARGEST)
            content = noise[start : start + chance.randrange(SMALLEST, LARGEST)]
            cuts.append((content, zlib.crc32(content)))
        self._infos: list[zipfile.ZipInfo] = []
        self._contents: dict[str, memoryview] = {}
        self._starts: list[int] = []
        place = 0
        for number in range(MEMBERS):
            info = zipfile.ZipInfo(f"train2017/{number:012}.jpg")
            self._contents[info.filename], info.CRC = chance.choice(cuts)
            info.file_size = info.compress_size = len(self._contents[info.filename])
            info.header_offset = place
            self._infos.append(info)
            self._starts.append(place)
            place += len(info.FileHeader()) + info.file_size
        self._directory_start = place
        self.names = list(self._contents)

    @cached_property
    def _directory(self) -> bytes:
        file = _Behind(self._directory_start)
        with zipfile.ZipFile(file, "w") as archive:
            archive.filelist.extend(self._infos)
        return file.getvalue()

    @property
    def size(self) -> int:
        return self._directory_start + len(self._directory)

    def content(self, name: str) -> memoryview:
        """Return the content of a member."""
        return self._contents[name]

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Return the bytes from `start` up to `end` (exclusive), in pieces."""
        found = []
        number = max(0, bisect.bisect_right(self._starts, start) - 1)
        while start < min(end, self._directory_start):
            info = self._infos[number]
            place = info.header_offset
            for part in (memoryview(info.FileHeader()), self._contents[info.filename]):
                found.append(part[max(0, start - place) : max(0, end - place)])
                place += len(part)
            start, number = place, number + 1
        if start < end:
            found.append(memoryview(self._directory)[start - self._directory_start : end - self._directory_start])
        return [piece for piece in found if piece]


class _Behind(io.BytesIO):
    """A file that keeps only the bytes after an offset."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place

    def tell(self) -> int:
        return super().tell() + self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(offset - (self._place if whence == io.SEEK_SET else 0), whence) + self._place


ZIP = "train2017.zip"
PATH = re.compile(rb"GET /(\S+) ")
RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)


class Server:
    """Answers many clients. faults: share of the answers that break. latency: seconds."""

    def __init__(self, latency: float, faults: float) -> None:
        self._zip = VirtualZip()
        self._latency = latency
        self._faults = faults
        self._chance = random.Random(1)

    def run(self) -> None:
        """Serve until the process is killed."""
        self._zip.pieces(self._zip.size - 1, self._zip.size)  # creates its directory now, not in the first answer
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            print(listener.getsockname()[1], flush=True)
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = b""
            while True:
                while b"\r\n\r\n" not in asked:
                    block = connection.recv(65536)
                    if not block:
                        return
                    asked += block
                head, _, asked = asked.partition(b"\r\n\r\n")
                time.sleep(self._latency)
                if not self._answer(connection, head):
                    return

    def _answer(self, connection: socket.socket, head: bytes) -> bool:
        """Answer one request; return whether the connection can take another."""
        fault = self._chance.choice(["reset", "cut", "503"]) if self._chance.random() < self._faults else None
        if fault == "503":
            connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 0\r\n\r\n")
            return True
        name = PATH.match(head)[1].decode()
        if name == ZIP:
            start, end = (int(number) for number in RANGE.search(head + b"\r\n").groups())
            pieces = self._zip.pieces(start, end + 1)
            status = f"206 Part\r\nContent-Range: bytes {start}-{end}/{self._zip.size}"
        else:
            pieces = [self._zip.content(name)]
            status = "200 OK"
        length = sum(map(len, pieces))
        headers = f'HTTP/1.1 {status}\r\nContent-Type: image/jpeg\r\nContent-Length: {length}\r\nETag: "1"\r\n\r\n'
        if fault:
            pieces = [b"".join(pieces)[: length // 2]]
        _send(connection, [memoryview(headers.encode()), *pieces])
        if fault == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return fault is None


def _send(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Send all pieces without copying them, in one call if the socket accepts that."""
    sent = connection.sendmsg(pieces[:512])
    for piece in pieces:
        if sent < len(piece):
            connection.sendall(piece[sent:])
        sent = max(0, sent - len(piece))


if __name__ == "__main__":
    Server(*map(float, sys.argv[1:])).run()
