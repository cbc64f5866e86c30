"""What the tests' cluster needs from the machine, and the Debian packages that it installs if they are missing."""

import os

import debian
from cluster.paths import CACHE, STATE
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
