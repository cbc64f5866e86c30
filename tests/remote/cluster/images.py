"""The project's images, built from its Dockerfile with buildah, and again only when their sources change.

The machine's access to package indexes (proxies, mirrors, certificates) is mounted while a step runs, and is in no
layer of an image.
"""

import ast
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import machine
from cluster.binaries import PROGRAMS, binary
from cluster.paths import CACHE, PROJECT
from cluster.shell import alone, run

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
NAME = f"localhost/vlmflow/{SUITE}:1"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CARRIED_PIP_KEYS = ("cert", "extra-index-url", "index-url", "proxy", "timeout", "trusted-host")


def buildah(*argv: object, log: Path | None = None) -> str:
    """Run buildah on a store of the tests' own, and return what it prints.

    In its own mount namespace: the store's mounts are invisible to the machine, and end with the command.
    """
    store = CACHE / "buildah"
    places = ("--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay")
    # No metacopy: each layer's folder then holds whole files, as containerd's own snapshots do.
    return run("unshare", "--mount", "buildah", *places, "--storage-opt", "overlay.mountopt=nodev", *argv, log=log)


def recipe() -> str:
    """Return a text that changes when the base image must be built again."""
    return hashlib.sha256(repr((SUITE, PACKAGES)).encode()).hexdigest()[:16]


def make(log: Path) -> str:
    """Return the base image's name; build it if buildah's store lacks this recipe (a minute)."""
    made = CACHE / f"base-{recipe()}"
    if made.exists():
        return NAME
    archive = CACHE / "base.tar"
    options = (f"--include={','.join(PACKAGES)}", "--variant=minbase", "--skip=output/dev")
    # The machine's apt settings are used for the download, and do not remain in the image.
    settings = (f"--aptopt={_apt_settings()}", '--customize-hook=rm --force "$1"/etc/apt/apt.conf.d/99mmdebstrap')
    run("mmdebstrap", *options, *settings, SUITE, archive, log=log)
    container = buildah("from", "scratch").strip()
    try:
        buildah("add", "--quiet", container, archive, "/")
        buildah("commit", "--quiet", container, NAME)
    finally:
        buildah("rm", container)
        archive.unlink()
    made.touch()
    return NAME


def build_time_mounts() -> list[str]:
    """Return buildah's options that give a step the machine's access to package indexes.

    Folders and files that the base has are mounted over, so that no empty file stays behind as a mount point. With
    them /root is a folder of the machine: what a step leaves in its home, in /tmp and in apt's cache is in no layer.
    """
    lent = CACHE / "build-home"
    shutil.rmtree(lent, ignore_errors=True)
    (lent / ".config" / "pip").mkdir(parents=True)
    (lent / ".config" / "uv").mkdir()
    settings = _pip_settings()
    (lent / ".config" / "pip" / "pip.conf").write_text(
        "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
    )
    index = os.environ.get("UV_DEFAULT_INDEX") or settings.get("index-url")
    (lent / ".config" / "uv" / "uv.toml").write_text(
        "system-certs = true\n" + (f'[[index]]\nurl = "{index}"\ndefault = true\n' if index else "")
    )
    lent.chmod(0o700)
    apt = CACHE / "build-apt"
    shutil.rmtree(apt, ignore_errors=True)
    apt.mkdir()
    shutil.copy(_apt_settings(), apt / "99machine")
    mounts = [f"{lent}:/root", f"{apt}:/etc/apt/apt.conf.d:ro"]
    for name, path in {"build-packages": "/var/cache/apt", "build-temporary": "/tmp"}.items():  # noqa: S108
        shutil.rmtree(CACHE / name, ignore_errors=True)
        (CACHE / name).mkdir()
        (CACHE / name).chmod(0o1777)
        mounts.append(f"{CACHE / name}:{path}")
    if bundle := _certificates():
        mounts.append(f"{bundle}:{CERTIFICATES}:ro")
    return [f"--volume={mount}" for mount in mounts]


def _certificates() -> Path | None:
    """Return the machine's bundle of certificate authorities, which may have more than the image's."""
    for path in (os.environ.get("SSL_CERT_FILE"), CERTIFICATES):
        if path and Path(path).is_file():
            return Path(path).resolve()
    return None


def _pip_settings() -> dict[str, str]:
    settings = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        place, _, value = line.partition("=")
        key = place.rpartition(".")[2].replace("_", "-")
        if key in CARRIED_PIP_KEYS:
            with contextlib.suppress(ValueError, SyntaxError):
                settings[key] = str(ast.literal_eval(value)).replace("\n", "\n  ")
    if _certificates():
        settings["cert"] = str(CERTIFICATES)
    return settings


def _apt_settings() -> Path:
    """Write the machine's apt settings for reaching an archive to a separate file, and return it."""
    wanted = ("Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries")
    lines = [line for line in run("apt-config", "dump").splitlines() if line.startswith(wanted)]
    path = CACHE / "apt.conf"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return path


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


def build_all() -> None:
    """Build what a full run needs and the cache lacks, programs and images side by side; a second if it lacks none.

    Compilers keep the cores busy while the images' builds wait for downloads and the disk.
    """
    machine.prepare()
    with ThreadPoolExecutor() as pool:
        programs = pool.submit(lambda: [binary(name) for name in PROGRAMS])
        built = pool.submit(lambda: [project_image(target) for target in TARGETS])
        programs.result()
        built.result()


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
    base = make(log)
    revision = run("git", "-C", PROJECT, "rev-parse", "HEAD").strip()
    values = ("--build-arg", f"BASE={base}", "--build-arg", f"REVISION={revision}")
    arguments = (*values, "--target", target, "--tag", stored_name(name))
    # chroot: steps run as they are on a machine that is a container itself.
    steps = ("--isolation", "chroot", "--network", "host", "--layers", "--pull-never")
    buildah("bud", *steps, *build_time_mounts(), *arguments, PROJECT, log=log)
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
    digest = hashlib.sha256(recipe().encode())
    more = [] if target in TARGETS else [PROJECT / "envs" / f"{target}.lock"]
    if target == "train":
        # Of the library it holds, only what the server there does: others have another copy.
        more = [PROJECT / "scripts" / "vlmflow" / name for name in ("serving/guarded.py", "pictures/decode.py")]
    if target == "jupyter":
        code = sorted((PROJECT / "scripts" / "vlmflow").rglob("*"))
        more.append(PROJECT / "notebooks" / "look.ipynb")
        more += [path for path in code if path.is_file() and path.parent.name != "__pycache__"]
    for path in [PROJECT / "Dockerfile", PROJECT / ".dockerignore", *ENVS, *more]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
