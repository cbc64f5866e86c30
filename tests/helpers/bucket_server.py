"""A bucket on loopback as S3's API serves it to a reader: objects, ranges and error codes, with faults on demand."""

import hashlib
import re
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlparse

from faulty_server import Answer, Fault, FaultyHandler, FaultyServer
from remote.storage import folder_manifest
from remote.storage.folder_manifest import Entry


class BucketServer(FaultyServer):
    """One bucket, `bucket`, whose objects are in memory.

    faults: by the end of a key, those of the next requests for it. ranges: what was asked of each object, in order.
    sent: bytes that left for each object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.ranges: dict[str, list[str | None]] = {}
        self.sent: dict[str, int] = {}
        super().__init__()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler_for(self)

    def store(self, folder: str, files: dict[str, bytes], letter: str = "0") -> dict[str, Entry]:
        """Store a folder as `s3_folder` does: the objects of one attempt, and the manifest."""
        attempt = f"{folder}/.stored-{letter * 32}/files"
        entries = {
            name: Entry(len(content), f"{attempt}/{name}", hashlib.sha256(content).hexdigest())
            for name, content in files.items()
        }
        self.objects |= {f"{attempt}/{name}": content for name, content in files.items()}
        self.objects[f"{folder}/{folder_manifest.NAME}"] = folder_manifest.dump(entries)
        return entries

    @property
    def variables(self) -> dict[str, str]:
        """The storage plugin's environment variables."""
        own = {"endpoint_url": f"http://127.0.0.1:{self.port}", "access_key": "a", "secret_key": "s" * 8}
        return {f"SNAKEMAKE_STORAGE_S3_{name.upper()}": value for name, value in own.items()} | {
            "no_proxy": "127.0.0.1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def etag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _handler_for(bucket: BucketServer) -> type[BaseHTTPRequestHandler]:
    class Handler(FaultyHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            key = unquote(urlparse(self.path).path).removeprefix("/bucket/")
            with bucket.lock:
                answer = self._answer(key)
                if self.command == "GET":
                    bucket.ranges.setdefault(key, []).append(self.headers.get("range"))
                    waiting = next((faults for end, faults in bucket.faults.items() if key.endswith(end)), [])
                    answer = waiting.pop(0)(answer) if waiting else answer
            self.send(answer, bucket.pace, lambda count: self._count(key, count))

        def _count(self, key: str, count: int) -> None:
            with bucket.lock:
                bucket.sent[key] = bucket.sent.get(key, 0) + count

        def _answer(self, key: str) -> Answer:
            content = bucket.objects.get(key)
            if content is None:
                return _error(404, "NoSuchKey")
            named = {f"x-amz-meta-{name}": value for name, value in bucket.metadata.get(key, {}).items()}
            headers = {"ETag": etag_of(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"} | named
            if self.headers.get("if-match", etag_of(content)) != etag_of(content):
                return _error(412, "PreconditionFailed")
            if not (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))):
                return Answer(200, headers, content, content)
            begin, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
            if begin >= len(content):
                return _error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            return Answer(206, headers, content[begin:end], content)

    return Handler


def _error(status: int, code: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())
