"""The links between the machine, the nodes and their pods: one flat network without access to the outside.

Each node has a bridge `pods`; the first node's is joined to the machine by the link LINK and to the other nodes. The
machine itself gets one link, and no bridge, rule or sysctl: it reaches every pod, and pods reach only its address.
"""

import contextlib
import json
from pathlib import Path

from cluster.paths import (
    LINK,
    MACHINE_ADDRESS,
    NODE_ADDRESSES,
    POD_NETWORK,
    POD_RANGES,
    SERVICE_NETWORK,
)
from cluster.shell import run, wait_for
from vlmflow.core.errors import VlmflowError

BRIDGE = "pods"
HARDWARE_ADDRESSES = {"node-a": "02:00:0a:e7:00:01", "node-b": "02:00:0a:e7:00:02"}
"""Fixed: otherwise a bridge takes its lowest port's address, and neighbours' tables become stale with a new pod."""


def refuse_taken_addresses() -> None:
    """Raise VlmflowError if the cluster would shadow a route or link of the machine."""
    for route in json.loads(run("ip", "-j", "route")):
        if route["dst"].startswith(("10.231.0.", "10.232.0.")):
            raise VlmflowError(
                f"the machine already has a route to {route['dst']} (device {route.get('dev')})",
                "end what uses it: the tests' cluster needs 10.231.0.0/24 and 10.232.0.0/24",
            )


def connect(node: str, pid: int, first_pid: int) -> None:
    """Give a node its bridge, address and link.

    pid: process 1 of the node; first_pid: that of the first node, where the machine's link ends.
    """
    _in(pid, "ip", "link", "add", BRIDGE, "address", HARDWARE_ADDRESSES[node], "type", "bridge")
    _in(pid, "ip", "address", "add", f"{NODE_ADDRESSES[node]}/24", "dev", BRIDGE)
    _in(pid, "ip", "link", "set", BRIDGE, "up")
    # There is no route out: a pod that tries fails at once.
    _in(pid, "ip", "route", "add", "unreachable", "default")
    # kube-proxy rewrites service addresses only in packets that have a route.
    _in(pid, "ip", "route", "add", SERVICE_NETWORK, "dev", BRIDGE)
    if pid == first_pid:
        run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "machine", "netns", pid)
        run("ip", "address", "add", f"{MACHINE_ADDRESS}/24", "dev", LINK)
        run("ip", "link", "set", LINK, "up")
        _in(pid, "ip", "link", "set", "machine", "master", BRIDGE, "up")
    else:
        _forget_link(first_pid, node)
        _in(first_pid, "ip", "link", "add", node, "type", "veth", "peer", "name", "node-a", "netns", pid)
        _in(first_pid, "ip", "link", "set", node, "master", BRIDGE, "up")
        _in(pid, "ip", "link", "set", "node-a", "master", BRIDGE, "up")


def disconnect() -> None:
    """Remove the machine's link, nothing if it is gone.

    The kernel takes it away with the last namespace it leads to, but some time after that one's last process ended
    (network_namespaces(7) promises no moment): the next test, or cluster, would still find it.
    """
    with contextlib.suppress(VlmflowError):  # already gone, or just being removed
        run("ip", "link", "delete", LINK)
    wait_for(f"the link {LINK} is gone", lambda: not Path("/sys/class/net", LINK).exists(), pause=0.01)


def _forget_link(pid: int, link: str) -> None:
    """Remove the link to a previous node: like the machine's, it outlives the node's last process."""

    def gone() -> bool:
        with contextlib.suppress(VlmflowError):
            _in(pid, "ip", "link", "delete", link)
        return link not in [each["ifname"] for each in json.loads(_in(pid, "ip", "-j", "link"))]

    wait_for(f"the link {link} is gone", gone, pause=0.01)


def write_pod_network(node: str, folder: Path) -> None:
    """Write what the container network plugins read: pods are ports of the node's bridge."""
    first, last = POD_RANGES[node]
    addresses = {"subnet": POD_NETWORK, "rangeStart": first, "rangeEnd": last, "gateway": NODE_ADDRESSES[node]}
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(folder / "addresses"),
            "ranges": [[addresses]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    plugins = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
    (folder / "network").mkdir(exist_ok=True)
    (folder / "network" / "pods.conflist").write_text(json.dumps(plugins))


def _in(pid: int, *argv: object) -> str:
    return run("nsenter", "--target", pid, "--net", *argv)
