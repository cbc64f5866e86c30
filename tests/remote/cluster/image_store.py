"""Images without a registry: static programs as archives, and built images, in a node's containerd.

A built image is not copied: it takes seconds, and is on the disk once.

An import keeps each layer's archive, unpacks it into a snapshot, and records the image. buildah's store holds
the unpacked layers in the form that overlayfs snapshots have (whiteouts as devices, opaque folders as attributes), on
the same file system. So each snapshot consists of hard links to them, under the name that containerd looks for (the
chain ID of OCI's image specification), and the image is recorded by an import with empty layer archives, which would
be read only to unpack a missing snapshot.
"""

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path

from cluster import images
from cluster.binaries import binary
from cluster.node import PAUSE_IMAGE, Node
from cluster.paths import CACHE
from cluster.shell import run
from vlmflow.core.errors import VlmflowError

ARCHIVES = CACHE / "archives"


def pause_archive() -> Path:
    """Return the archive of the image that holds a pod's namespaces."""
    return program_archive(PAUSE_IMAGE, binary("pause"))


def program_archive(image: str, program: Path) -> Path:
    """Return a docker-archive of an image that holds one static program, run as its entry point by user 65534.

    Written once per program: its folder's name in the cache carries its sources' digest.
    """
    archive = ARCHIVES / f"{program.parent.name}.tar"
    if archive.exists():
        return archive
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        add_member(tar, program.name, program.read_bytes(), 0o755)
    name = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65534"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{name}"]},
    }
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    making = archive.with_suffix(".making")
    with tarfile.open(making, "w") as tar:
        add_member(tar, f"{name}.tar", layer.getvalue())
        add_member(tar, "config.json", json.dumps(config).encode())
        manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": [f"{name}.tar"]}]
        add_member(tar, "manifest.json", json.dumps(manifest).encode())
    making.rename(archive)
    return archive


def carry_in(node: Node, archive: Path) -> None:
    """Import an archive's image into a node's store, unless it was imported before."""
    seen = node.image_store / f"carried-{archive.stem}"
    if seen.exists():
        return
    node.ctr("images", "import", archive)
    seen.touch()


def add_member(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """Add a file to a tar from memory."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def carry_image(node: Node, name: str) -> None:
    """Put an image of buildah's store into a node's, unless it has that image.

    Layers that only an earlier image of this name had are removed, as soon as no pod is left that was made of them.
    """
    record = _record(node, name)
    before = json.loads(record.read_text()) if record.exists() else {"identity": None, "chains": [], "stale": []}
    identity = images.image_id(name)
    if before["identity"] == identity:
        return
    have = layers_in(node)
    chains: list[str] = []
    for layer in images.layers(name):
        parent = chains[-1] if chains else ""
        chain = f"sha256:{hashlib.sha256(f'{parent} {layer.digest}'.encode()).hexdigest()}" if parent else layer.digest
        if chain not in have:
            _link_snapshot(node, layer.files, chain, parent)
        chains.append(chain)
    archive = ARCHIVES / f"{identity}.tar"
    _write_archive(archive, name)
    node.ctr("images", "import", "--no-unpack", archive)
    archive.unlink()
    stale = [*before["stale"], *(chain for chain in before["chains"] if chain not in chains)]
    record.write_text(json.dumps({"identity": identity, "chains": chains, "stale": stale}))
    record.write_text(json.dumps({"identity": identity, "chains": chains, "stale": _remove_stale(node, stale)}))


def layers_in(node: Node) -> set[str]:
    """Return the names of the layers that a node has, whoever uses them."""
    return set(re.findall(r"^sha256:\S+", node.ctr("snapshots", "list"), re.MULTILINE))


def _record(node: Node, name: str) -> Path:
    """Return the file that says which image a node has under a name, and of which snapshots it is made."""
    return node.image_store / f"carried-{name.replace('/', '-')}.json"


def _remove_stale(node: Node, stale: list[str]) -> list[str]:
    """Remove snapshots, and return those that something still needs: an image, or a pod that is still recorded."""
    used = {
        chain for path in node.image_store.glob("carried-*.json") for chain in json.loads(path.read_text())["chains"]
    }
    kept = []
    for chain in reversed(stale):
        try:
            if chain not in used:
                node.ctr("snapshots", "remove", chain)
        except VlmflowError:
            kept.insert(0, chain)
    return kept


def _link_snapshot(node: Node, files: Path, chain: str, parent: str) -> None:
    making = f"making-{chain}"
    if making in node.ctr("snapshots", "list"):
        node.ctr("snapshots", "remove", making)
    node.ctr("snapshots", "prepare", making, *([parent] if parent else []))
    mount = node.ctr("snapshots", "mounts", "/mnt", making)
    upper = re.search(r"upperdir=([^,\s]+)", mount) or re.search(r"(\S+/fs) /mnt", mount)
    run("cp", "--archive", "--link", f"{files}/.", upper.group(1))
    node.ctr("snapshots", "commit", chain, making)


def _write_archive(archive: Path, name: str) -> None:
    """Write an OCI archive with the image's configuration and, for each layer, an empty archive."""
    nothing = io.BytesIO()
    with tarfile.open(fileobj=nothing, mode="w"):
        pass
    empty = nothing.getvalue()
    configuration = images.configuration(name)
    kept = {key: configuration[key] for key in ("architecture", "os", "config", "rootfs", "created")}
    blobs = {}

    def blob(data: bytes, kind: str) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(kept).encode(), "config.v1+json"),
        "layers": [blob(empty, "layer.v1.tar") for _ in kept["rootfs"]["diff_ids"]],
    }
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"io.containerd.image.name": images.stored_name(name)}
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    blobs["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        for path, data in blobs.items():
            add_member(tar, path, data)
