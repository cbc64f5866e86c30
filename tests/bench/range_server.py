"""A server of ranges of a virtual zip, and of its members by name, with latency and faults and little work of its own.

python tests/bench/range_server.py LATENCY FAULT_SHARE   (prints its port)
"""

import random
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

from virtual_zip import VirtualZip

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
