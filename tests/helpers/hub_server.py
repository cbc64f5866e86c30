"""A local Hugging Face hub, with huggingface_hub's protocol (without Xet) and faults on demand.

The hub answers as 127.0.0.1 and redirects LFS files to its storage, "localhost": a client sees two hosts. The
storage's addresses are signed for a short time, and a token that reaches the storage counts as leaked. It takes files,
too: repositories, LFS (git-lfs' batch API, basic transfer), commits, tags, as the hub's client without Xet uses it
(HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

from faulty_server import Answer, Fault, FaultyHandler, FaultyServer
from vlmflow.core import patience
from workflow_runs import program

PLAIN_BYTES = 10 << 20
"""The hub keeps smaller texts outside LFS; ours keeps all small JSON and Markdown so."""


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """Read the body of a request, sent with its length or in chunks."""
    if "Content-Length" in request.headers:
        return request.rfile.read(int(request.headers["Content-Length"]))
    body = b""
    while request.headers.get("Transfer-Encoding") == "chunked" and (size := int(request.rfile.readline(), 16)):
        body += request.rfile.read(size)
        request.rfile.readline()
    return body


def written(hub: "HubServer", address: str, login: str | None, body: bytes) -> tuple[str, str, Answer]:
    """Do what a POST or PUT asks for; return its kind, the name of the repository or object, and the answer."""
    url = urlsplit(address)
    path = unquote(url.path).lstrip("/")
    if path.startswith("storage/"):
        return _stored(hub, path.removeprefix("storage/"), parse_qs(url.query), body)
    if login != f"Bearer {hub.token}":
        return "write", path, Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
    if path == "api/validate-yaml":
        return "validate", path, _json({"errors": [], "warnings": []})
    if path == "api/repos/create":
        return _created(hub, json.loads(body))
    if path.endswith(".git/info/lfs/objects/batch"):
        name = path.removesuffix(".git/info/lfs/objects/batch")
        return "batch", name, _batch(hub, name, json.loads(body))
    if path.endswith(".git/info/lfs/verify"):
        return "verify", path, _json({})
    owner, name, action, revision = path.removeprefix("api/models/").split("/", 3)
    repo = hub.repos[f"{owner}/{name}"]
    do = {"preupload": _preupload, "commit": _commit, "tag": _tag}[action]
    return action, f"{owner}/{name}", do(repo, f"{hub.endpoint}/{owner}/{name}", revision, body)


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _created(hub: "HubServer", asked: dict[str, Any]) -> tuple[str, str, Answer]:
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.repos:
        return "create", name, _json({"error": "You already created this model repo"}, 409)
    hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, plain=(".gitattributes",))
    hub.repos[name].private = asked["visibility"] == "private"
    return "create", name, _json({"url": f"{hub.endpoint}/{name}"})


def _preupload(repo: "Repo", page: str, revision: str, body: bytes) -> Answer:
    files = repo.at(revision)[1]
    told = []
    for file in json.loads(body)["files"]:
        plain = file["path"].endswith((".json", ".md", ".jinja", ".txt")) and file["size"] < PLAIN_BYTES
        entry = {"path": file["path"], "uploadMode": "regular" if plain else "lfs", "shouldIgnore": False}
        if (there := files.get(file["path"])) is not None:
            entry["oid"] = _blob(there) if plain else hashlib.sha256(there).hexdigest()
        told.append(entry)
    return _json({"files": told})


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _batch(hub: "HubServer", name: str, asked: dict[str, Any]) -> Answer:
    """Say where each object goes; one that is there already has no actions (git-lfs, docs/api/batch.md)."""
    objects = []
    for one in asked["objects"]:
        entry = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] not in hub.repos[name].stored:
            entry["actions"] = {
                "upload": {"href": f"{hub.storage}/storage/{name}/{one['oid']}?Signature={hub.signature}"},
                "verify": {"href": f"{hub.endpoint}/{name}.git/info/lfs/verify"},
            }
        objects.append(entry)
    return _json({"transfer": "basic", "objects": objects})


def _stored(hub: "HubServer", path: str, query: dict[str, list[str]], body: bytes) -> tuple[str, str, Answer]:
    name, _, oid = path.rpartition("/")
    if query.get("Signature") != [hub.signature]:
        return "put", oid, Answer(403, {})
    hub.repos[name].stored[oid] = hub.on_upload(body)
    return "put", oid, Answer(200, {})


def _commit(repo: "Repo", page: str, revision: str, body: bytes) -> Answer:
    """Add the files of a commit, one line of JSON each, after the line `header`."""
    lines = [json.loads(line) for line in body.splitlines()]
    parent = lines[0]["value"].get("parentCommit")
    if parent not in (None, repo.revision):
        return _json({"error": "A commit has happened since"}, 412)
    files, plain = dict(repo.files), set(repo.plain)
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
            plain.add(value["path"])
        else:
            files[value["path"]] = repo.stored[value["oid"]]
    repo.past[repo.revision] = repo.files
    repo.files, repo.plain = files, frozenset(plain)
    repo.revision = hashlib.sha1(repo.revision.encode() + body, usedforsecurity=False).hexdigest()
    return _json({"commitUrl": f"{page}/commit/{repo.revision}", "commitOid": repo.revision})


def _tag(repo: "Repo", page: str, revision: str, body: bytes) -> Answer:
    tag = json.loads(body)["tag"]
    if tag in repo.tags:
        return _json({"error": "Tag reference exists already"}, 409)
    repo.tags[tag] = repo.at(revision)[0]
    return _json({})


REVISION = "1" * 40
TOKEN = "hf_tokenThatNobodyMaySee"  # noqa: S105
SIGNATURE = "signatureThatNobodyMaySee"


@dataclass
class Request:
    kind: str
    """head (metadata), api, or bytes."""
    path: str
    headers: dict[str, str]
    sent: int = 0
    """Bytes of the body that were sent."""

    def count(self, sent: int) -> None:
        self.sent += sent


@dataclass
class Repo:
    files: dict[str, bytes]
    plain: frozenset[str]
    """Names of the files that are not in LFS."""
    revision: str
    gated: bool = False
    private: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    """Commits, by tag."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded to LFS, by the SHA-256 that the client gave; a commit may name it later."""
    past: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of earlier commits."""

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit that a commit, a tag or "main" names, with its files; None if there is none."""
        commit = {**self.tags, "main": self.revision}.get(revision, revision)
        files = self.files if commit == self.revision else self.past.get(commit)
        return None if files is None else (commit, files)


class HubServer(FaultyServer):
    """Serves until its `with` block ends.

    faults: by (kind, file name), the faults of the next answers, in order; kind as in Request. For `api` the
    name is the repository's.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self.requests: list[Request] = []
        self.leaked: list[str] = []
        self.on_upload: Callable[[bytes], bytes] = bytes
        """Gets what is uploaded to LFS, and returns what is stored; it may wait."""
        super().__init__()
        self.token, self.signature = TOKEN, SIGNATURE
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.storage = f"http://localhost:{self.port}"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler_for(self)

    def add(
        self,
        repo: str,
        files: dict[str, bytes],
        *,
        plain: tuple[str, ...] = (),
        revision: str = REVISION,
        gated: bool = False,
    ) -> None:
        """Add a repository. repo: "OWNER/NAME", or "datasets/OWNER/NAME"."""
        self.repos[repo] = Repo(files, frozenset(plain), revision, gated)

    def sent(self, name: str) -> int:
        """Return how many bytes of a file were sent, over all requests."""
        return sum(request.sent for request in self.requests if request.kind == "bytes" and request.path.endswith(name))

    def ranges(self, name: str) -> list[str | None]:
        """Return the Range of every request for a file's bytes, in order."""
        return [
            request.headers.get("range")
            for request in self.requests
            if request.kind == "bytes" and request.path.endswith(name)
        ]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _handler_for(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(FaultyHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            kind, name, answer = self._find() if self.command in ("HEAD", "GET") else self._written()
            request = Request(kind, name, {key.lower(): text for key, text in self.headers.items()})
            with hub.lock:
                hub.requests.append(request)
                waiting = hub.faults.get((kind, name))
                fault = waiting.pop(0) if waiting else None
            self.send(fault(answer) if fault else answer, hub.pace, request.count)

        def _find(self) -> tuple[str, str, Answer]:
            url = urlsplit(self.path)
            path = unquote(url.path).lstrip("/")
            if path.startswith("storage/"):
                return self._stored(path.removeprefix("storage/"), parse_qs(url.query))
            if path.startswith("api/"):
                return self._described(path)
            repo_name, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            kind = "head" if self.command == "HEAD" else "bytes"
            repo = hub.repos.get(repo_name)
            if refusal := self._refusal(repo, revision, name):
                return kind, name, refusal
            content = repo.files[name]
            headers = {"X-Repo-Commit": repo.revision}
            if name in repo.plain:
                return kind, name, self._ranged(content, {**headers, "ETag": f'"{blob_id(content)}"'})
            headers |= {
                "Location": f"{hub.storage}/storage/{repo_name}/{name}?Signature={SIGNATURE}",
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{sha256(content)}"',
            }
            return kind, name, Answer(302, headers)

        def _written(self) -> tuple[str, str, Answer]:
            body = body_of(self)
            if self.path.startswith("/storage/") and "Authorization" in self.headers:
                hub.leaked.append(self.path)
            return written(hub, self.path, self.headers.get("Authorization"), body)

        def _refusal(self, repo: Repo | None, revision: str, name: str | None) -> Answer | None:
            if repo is None:
                return Answer(401, {"X-Error-Code": "RepoNotFound"})
            if repo.gated:
                return Answer(403, {"X-Error-Code": "GatedRepo"})
            if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
                return Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            if repo.private and "Authorization" not in self.headers:
                return Answer(401, {"X-Error-Code": "RepoNotFound"})
            if repo.at(revision) is None:
                return Answer(404, {"X-Error-Code": "RevisionNotFound"})
            if name is not None and name not in repo.files:
                return Answer(404, {"X-Error-Code": "EntryNotFound"})
            return None

        def _stored(self, path: str, query: dict[str, list[str]]) -> tuple[str, str, Answer]:
            if "Authorization" in self.headers:
                hub.leaked.append(path)
            repo = next(name for name in hub.repos if path.startswith(name + "/"))
            name = path.removeprefix(repo + "/")
            if query.get("Signature") != [SIGNATURE]:
                return "bytes", name, Answer(403, {})
            content = hub.repos[repo].files[name]
            return "bytes", name, self._ranged(content, {"ETag": f'"s3-{sha256(content)[:8]}"'})

        def _ranged(self, content: bytes, headers: dict[str, str]) -> Answer:
            wanted = self.headers.get("Range")
            headers = {"Content-Type": "application/octet-stream", **headers}
            if not wanted or self.headers.get("If-Range", headers["ETag"]) != headers["ETag"]:
                return Answer(200, headers, content, content)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
            if start >= len(content):
                return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return Answer(206, headers, content[start : end + 1], content)

        def _described(self, path: str) -> tuple[str, str, Answer]:
            kind, _, rest = path.removeprefix("api/").partition("/")
            name, _, revision = rest.partition("/revision/")
            repo = hub.repos.get(f"datasets/{name}" if kind == "datasets" else name)
            if refusal := self._refusal(repo, revision or (repo.revision if repo else ""), None):
                return "api", name, refusal
            siblings = []
            commit, files = repo.at(revision or repo.revision)
            for file, content in files.items():
                entry = {"rfilename": file, "size": len(content), "blobId": blob_id(content)}
                if file not in repo.plain:
                    entry["lfs"] = {"size": len(content), "sha256": sha256(content), "pointerSize": 130}
                siblings.append(entry)
            described = {"id": name, "sha": commit, "private": repo.private, "siblings": siblings}
            body = json.dumps(described).encode()
            return "api", name, Answer(200, {"Content-Type": "application/json"}, body)

    return Handler


def command(script: str, **values: object) -> list[str]:
    """Return the command line of one of the project's scripts; values that are not strings are written as JSON."""
    options = [
        part
        for name, value in values.items()
        for part in (f"--{name.replace('_', '-')}", str(value) if isinstance(value, str | Path) else json.dumps(value))
    ]
    return [sys.executable, str(program(script)), *options]


@contextmanager
def served_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve as the hub of huggingface_hub, in this process and in those that it starts.

    There is a token, and waits between attempts are short. A server may pause for 10 s, longer than a busy
    machine needs, so that no request is made twice.
    """
    with HubServer() as server:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(patience, "LONGEST_WAIT", 0.05)
        monkeypatch.setattr(patience, "READ_TIMEOUT", 10)
        yield server
