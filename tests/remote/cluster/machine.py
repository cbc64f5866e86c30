"""What the tests' cluster needs from the machine, and the state of the machine, which it must not change."""

import json
import os
from pathlib import Path

import debian
from cluster.paths import CACHE, STATE
from cluster.shell import run
from vlmflow.core.errors import VlmflowError

PACKAGES = {
    "buildah": "buildah",
    "containerd": "containerd",
    "ctr": "containerd",
    "ip": "iproute2",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "rsync": "rsync",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Program to Debian package. Debian's containerd pulls in runc; crun fails on hybrid cgroups."""
LONGEST_SOCKET_PATH = 107  # unix(7)


def why_not() -> str | None:
    """Say in one line why the cluster cannot run on this machine, None if it can."""
    if not debian.is_debian():
        return "the tests' cluster needs a Debian machine (or set KUBECONFIG to a cluster of your own)"
    if os.geteuid() != 0:
        return "the tests' cluster needs root (or set KUBECONFIG to a cluster of your own)"
    if os.uname().machine != "x86_64":
        return "the tests' cluster needs x86-64, as the locked packages do"
    if len(str(STATE / "node-a" / "containerd.sock.ttrpc")) > LONGEST_SOCKET_PATH:
        return f"{CACHE} is too long a path for sockets: set XDG_CACHE_HOME to a shorter one"
    return None


def prepare() -> None:
    """Install the Debian packages that are missing. Raises VlmflowError if the cluster cannot run here."""
    if reason := why_not():
        raise VlmflowError(reason, "run it as root on Debian, or on a cluster of your own through KUBECONFIG")
    debian.install(PACKAGES, CACHE / "apt.log")


FOLDERS = (
    "/etc/cni/net.d",
    "/opt/cni",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)
SYSCTLS = ("kernel/keys/*", "kernel/panic*", "net/bridge/*", "net/ipv4/*forward*", "net/ipv4/conf/*/*", "vm/*")
CHANGING_SYSCTLS = ("compact_memory", "drop_caches", "stat_refresh")


def machine_state() -> dict[str, object]:
    """Return processes, mounts, links, routes, firewall rules, cgroups, sysctls and folders."""
    return {
        "processes": sorted(_processes()),
        "mounts": sorted(Path("/proc/self/mounts").read_text().splitlines()),
        "links": sorted(link["ifname"] for link in json.loads(run("ip", "-j", "link"))),
        "addresses": run("ip", "-brief", "address"),
        "routes": run("ip", "route"),
        "rules": run("nft", "list", "ruleset"),
        "network namespaces": sorted(_network_namespaces()),
        "cgroups": sorted(folder for folder, _, _ in os.walk("/sys/fs/cgroup") if "vlmflow" in folder),
        "sysctls": _sysctls(),
        "folders": [folder for folder in FOLDERS if Path(folder).exists()],
    }


def _processes() -> list[str]:
    """Return the command lines of what a cluster runs: its own parts, and pods in PID namespaces of theirs."""
    own, found = os.readlink("/proc/self/ns/pid"), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            stranger = os.readlink(folder / "ns" / "pid") != own
        except OSError:
            continue
        if stranger or str(CACHE) in line:
            found.append(line)
    return found


def _network_namespaces() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


def _sysctls() -> dict[str, str]:
    values = {}
    for pattern in SYSCTLS:
        for path in Path("/proc/sys").glob(pattern):
            if path.name not in CHANGING_SYSCTLS and os.access(path, os.R_OK) and path.stat().st_mode & 0o444:
                values[str(path)] = path.read_text().strip()
    return values
