"""The project's images, built from its Dockerfile with buildah, and again only when their sources change."""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from cluster import base_image
from cluster.base_image import buildah
from cluster.locks import alone
from cluster.paths import CACHE, PROJECT
from cluster.shell import run

TARGETS = ("data", "train")
"""The targets that the workflow's pods use. Others are built when a test asks for them."""


@dataclass(frozen=True)
class Layer:
    """A layer of an image in buildah's store: the digest of its uncompressed archive, and its files."""

    digest: str
    files: Path


def image_name(target: str) -> str:
    """Return the name of a Dockerfile target's image in k8s/: vlmflow/TARGET:VERSION."""
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return f"vlmflow/{target}:{version}"


def project_image(target: str) -> str:
    """Return the name of a Dockerfile target's image; build it if its sources have changed.

    Raises VlmflowError with the end of the build's log if a step fails.
    """
    with alone("images"):
        return _build_if_changed(target, image_name(target))


def stored_name(name: str) -> str:
    """Return the full name that a short one stands for: kubelet and containerd look for that."""
    return f"docker.io/{name}"


def image_id(name: str) -> str:
    """Return the digest of an image's configuration, which changes with anything in the image."""
    return json.loads(buildah("inspect", "--type", "image", stored_name(name)))["FromImageID"]


def configuration(name: str) -> dict:
    """Return an image's configuration as OCI's image specification has it."""
    return json.loads(buildah("inspect", "--type", "image", stored_name(name)))["OCIv1"]


def layers(name: str) -> list[Layer]:
    """Return an image's layers from the lowest up (containers/storage keeps each layer's files in overlay/ID/diff)."""
    store = CACHE / "buildah" / "root"
    images = json.loads((store / "overlay-images" / "images.json").read_text())
    known = {layer["id"]: layer for layer in json.loads((store / "overlay-layers" / "layers.json").read_text())}
    above: str | None = next(each["layer"] for each in images if stored_name(name) in each.get("names", ()))
    found = []
    while above:
        found.append(Layer(known[above]["diff-digest"], store / "overlay" / above / "diff"))
        above = known[above].get("parent")
    return found[::-1]


def _build_if_changed(target: str, name: str) -> str:
    if _is_built(target):
        return name
    print(f"building the image {name}: {CACHE / 'images' / target}.log", flush=True)
    built = _record(target)
    built.parent.mkdir(parents=True, exist_ok=True)
    built.unlink(missing_ok=True)
    log = built.with_suffix(".log")
    log.unlink(missing_ok=True)
    base = base_image.make(log)
    revision = run("git", "-C", PROJECT, "rev-parse", "HEAD").strip()
    values = ("--build-arg", f"BASE={base}", "--build-arg", f"REVISION={revision}")
    arguments = (*values, "--target", target, "--tag", stored_name(name))
    # chroot: steps run as they are on a machine that is a container itself.
    steps = ("--isolation", "chroot", "--network", "host", "--layers", "--pull-never")
    buildah("bud", *steps, *base_image.build_time_mounts(), *arguments, PROJECT, log=log)
    built.write_text(json.dumps({"sources": _sources(target), "name": name}))
    if all(_is_built(each) for each in TARGETS):
        buildah("rmi", "--prune")  # replaced images, and stages that only these builds needed
    return name


def _record(target: str) -> Path:
    return CACHE / "images" / f"{target}.json"


def _is_built(target: str) -> bool:
    record = _record(target)
    wanted = {"sources": _sources(target), "name": image_name(target)}
    return record.exists() and json.loads(record.read_text()) == wanted


ENVS = [
    PROJECT / "envs" / name for name in ("uv.lock", "data.lock", "train.lock", "quick_plugins.py", "quick_plugins.pth")
]


def _sources(target: str) -> str:
    """Return the digest of the files that a target is made of, the Dockerfile, and the base's recipe."""
    digest = hashlib.sha256(base_image.recipe().encode())
    more = [] if target in TARGETS else [PROJECT / "envs" / f"{target}.lock"]
    if target == "train":
        more = [PROJECT / "scripts" / "vlmflow" / "serving" / "guarded.py"]
    if target == "jupyter":
        code = sorted((PROJECT / "scripts" / "vlmflow").rglob("*"))
        more.append(PROJECT / "notebooks" / "look.ipynb")
        more += [path for path in code if path.is_file() and path.parent.name != "__pycache__"]
    for path in [PROJECT / "Dockerfile", PROJECT / ".dockerignore", *ENVS, *more]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
