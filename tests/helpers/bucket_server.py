"""A bucket on loopback as S3's API serves it: objects, ranges, uploads, copies, error codes, and faults on demand."""

import hashlib
import re
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote, urlparse

from faulty_server import Answer, Fault, FaultyHandler, FaultyServer
from vlmflow.remote.storage import s3_folder
from vlmflow.remote.storage.s3_folder import Entry


class BucketServer(FaultyServer):
    """One bucket, `bucket`, whose objects are in memory.

    faults: by the end of a key, those of the next requests for it. ranges: what was asked of each object, in order.
    sent: bytes that left for each object. copied: the keys that were written by copies. copies: if not, it takes a
    copy for an upload of nothing.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.ranges: dict[str, list[str | None]] = {}
        self.sent: dict[str, int] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.copied: list[str] = []
        self.copies = True
        super().__init__()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler_for(self)

    def store(self, folder: str, files: dict[str, bytes], letter: str = "0") -> dict[str, Entry]:
        """Store a folder as `s3_folder` does: the objects of one attempt, and the manifest."""
        attempt = f"{folder}/.stored-{letter * 32}/files"
        entries = {
            name: Entry(len(content), hashlib.sha256(content).hexdigest(), f"{attempt}/{name}")
            for name, content in files.items()
        }
        self.objects |= {f"{attempt}/{name}": content for name, content in files.items()}
        self.objects[f"{folder}/{s3_folder.NAME}"] = s3_folder.dump(entries)
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
            key, asked = self._asked()
            with bucket.lock:
                answer = self._list(asked.get("prefix", "")) if key == "/bucket" else self._answer(key)
                if self.command == "GET":
                    bucket.ranges.setdefault(key, []).append(self.headers.get("range"))
                    answer = self._changed(key, answer)
            self.send(answer, bucket.pace, lambda count: self._count(key, count))

        def do_PUT(self) -> None:
            key, asked = self._asked()
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            source = unquote(self.headers.get("x-amz-copy-source", "")).removeprefix("bucket/") if bucket.copies else ""
            with bucket.lock:
                answer = Answer(200, {"ETag": etag_of(content)})
                if source:
                    answer, content = self._copy(source)
                answer = self._changed(key, answer)
                if answer.status == 200 and "partNumber" in asked:
                    bucket.parts.setdefault(key, {})[int(asked["partNumber"])] = content
                elif answer.status == 200:
                    bucket.objects[key] = content
                if answer.status == 200 and source:
                    bucket.copied.append(key)
            self.send(answer, 0, lambda count: None)

        def do_POST(self) -> None:
            """Begin an upload in parts, or complete it."""
            key, asked = self._asked()
            self.rfile.read(int(self.headers.get("content-length", 0)))
            with bucket.lock:
                parts = bucket.parts.pop(key, {})
                if "uploadId" in asked:
                    bucket.objects[key] = b"".join(parts[number] for number in sorted(parts))
            self.send(_xml("Result", "<UploadId>1</UploadId>"), 0, lambda count: None)

        def do_DELETE(self) -> None:
            """Abort an upload in parts."""
            with bucket.lock:
                bucket.parts.pop(self._asked()[0], None)
            self.send(Answer(204, {}), 0, lambda count: None)

        def _asked(self) -> tuple[str, dict[str, str]]:
            address = urlparse(self.path)
            words = parse_qs(address.query, keep_blank_values=True)
            return unquote(address.path).removeprefix("/bucket/"), {name: values[0] for name, values in words.items()}

        def _changed(self, key: str, answer: Answer) -> Answer:
            waiting = next((faults for end, faults in bucket.faults.items() if key.endswith(end)), [])
            return waiting.pop(0)(answer) if waiting else answer

        def _list(self, prefix: str) -> Answer:
            found = {key: content for key, content in bucket.objects.items() if key.startswith(prefix)}
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            items = (
                f"<Contents><Key>{quote(key)}</Key><Size>{len(content)}</Size><LastModified>{now}</LastModified></Contents>"
                for key, content in found.items()
            )
            return _xml("ListBucketResult", f"<EncodingType>url</EncodingType>{''.join(items)}")

        def _copy(self, source: str) -> tuple[Answer, bytes]:
            content = bucket.objects.get(source)
            if content is None:
                return error(404, "NoSuchKey"), b""
            if self.headers.get("x-amz-copy-source-if-match", etag_of(content)) != etag_of(content):
                return error(412, "PreconditionFailed"), b""
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-amz-copy-source-range", "")):
                content = content[int(asked[1]) : int(asked[2]) + 1]
            return _xml("CopyResult", f"<ETag>{etag_of(content)}</ETag>"), content

        def _count(self, key: str, count: int) -> None:
            with bucket.lock:
                bucket.sent[key] = bucket.sent.get(key, 0) + count

        def _answer(self, key: str) -> Answer:
            content = bucket.objects.get(key)
            if content is None:
                return error(404, "NoSuchKey")
            named = {f"x-amz-meta-{name}": value for name, value in bucket.metadata.get(key, {}).items()}
            headers = {"ETag": etag_of(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"} | named
            if self.headers.get("if-match", etag_of(content)) != etag_of(content):
                return error(412, "PreconditionFailed")
            if not (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))):
                return Answer(200, headers, content, content)
            begin, end = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            if begin >= len(content):
                return error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            return Answer(206, headers, content[begin:end], content)

    return Handler


def error(status: int, code: str) -> Answer:
    """Return S3's answer with an error's code."""
    return replace(_xml("Error", f"<Code>{code}</Code><Message>no</Message>"), status=status)


def _xml(name: str, content: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())
