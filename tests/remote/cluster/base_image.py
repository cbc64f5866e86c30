"""The Debian base of the images, from the package archive instead of a registry.

The machine's access to package indexes (proxies, mirrors, certificates) is mounted while a step runs, and is in no
layer of an image.
"""

import ast
import contextlib
import hashlib
import os
import shutil
import sys
from pathlib import Path

from cluster.paths import CACHE
from cluster.shell import run

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
