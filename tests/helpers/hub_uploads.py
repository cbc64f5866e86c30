"""The part of the tests' hub that takes files: repositories, LFS (git-lfs' batch API, basic transfer), commits, tags.

As the hub's client without Xet uses it (HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from faulty_server import Answer

if TYPE_CHECKING:
    from hub_server import HubServer, Repo

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
