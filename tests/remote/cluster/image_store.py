"""Images without a registry: archives of static programs, and their import into a node's containerd."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

from cluster.binaries import binary
from cluster.node import Node
from cluster.node_config import PAUSE_IMAGE
from cluster.paths import CACHE

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
