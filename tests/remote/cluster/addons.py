"""What some tests also need: DNS (CoreDNS), an S3 server (versitygw), fake nodes (kwok).

Each is a process in the first node's namespaces, and ends with it.
"""

import json
import secrets
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.paths import DNS_SERVICE_ADDRESS, KUBECONFIG, NODE_ADDRESSES, STATE
from cluster.processes import pid_of
from cluster.shell import wait_for

ADDRESS = NODE_ADDRESSES["node-a"]
S3_PORT = 7070
FAKE = {"kwok.x-k8s.io/node": "fake"}
COREFILE = f""".:53 {{
    bind {ADDRESS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {KUBECONFIG}
        fallthrough in-addr.arpa
        ttl 1
    }}
    cache 1
}}
"""


@dataclass(frozen=True)
class S3:
    """An S3 server that the machine and every pod reach at the same address; each folder in `folder` is a bucket."""

    endpoint: str
    access_key: str
    secret_key: str
    folder: Path


def start_dns(cluster: Cluster) -> None:
    """Let pods resolve services' names, if they cannot yet. Names outside the cluster are not found."""
    if pid_of("node-a.coredns"):
        return
    config = STATE / "Corefile"
    config.write_text(COREFILE)
    cluster.node.start_part("coredns", binary("coredns"), "-conf", config)
    meta = {"name": "kube-dns", "namespace": "kube-system"}
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    service = {"clusterIP": DNS_SERVICE_ADDRESS, "ports": ports}
    # Without a selector: the server is not a pod, so its address is given here.
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**meta, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
        "ports": ports,
    }
    cluster.apply([{"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service}, endpoints])


def start_s3(cluster: Cluster) -> S3:
    """Start the S3 server, and return how to reach it; its content ends with the cluster."""
    known = STATE / "s3.json"
    if pid_of("node-a.versitygw"):
        server = S3(**json.loads(known.read_text()))
        return S3(server.endpoint, server.access_key, server.secret_key, Path(server.folder))
    server = S3(f"http://{ADDRESS}:{S3_PORT}", "vlmflow", secrets.token_hex(16), STATE / "s3")
    shutil.rmtree(server.folder, ignore_errors=True)
    server.folder.mkdir()
    known.touch(mode=0o600)
    known.write_text(json.dumps(vars(server), default=str))
    # In its environment, because everyone can read an argument list.
    keys = {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
    flags = ("--port", f"{ADDRESS}:{S3_PORT}", "--region", "us-east-1")
    cluster.node.start_part("versitygw", binary("versitygw"), *flags, "posix", server.folder, env=keys)

    def answers() -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(server.endpoint, timeout=2).close()
        except urllib.error.HTTPError:
            return True  # it refuses requests without a key
        return True

    wait_for("the S3 server answers", answers)
    return server


def start_fake_nodes(cluster: Cluster) -> None:
    """Start kwok as the kubelet of the fake nodes: their pods run and Jobs complete without a process."""
    if pid_of("node-a.kwok"):
        return
    home = STATE / "kwok"
    home.mkdir(exist_ok=True)
    selector = ",".join(f"{key}={value}" for key, value in FAKE.items())
    flags = {
        "kubeconfig": KUBECONFIG,
        "manage-all-nodes": "false",
        "manage-nodes-with-annotation-selector": selector,
        "node-ip": ADDRESS,
        # Renewed every quarter of it, well within the grace period of the cluster's nodes.
        "node-lease-duration-seconds": 12,
    }
    words = (f"--{key}={value}" for key, value in flags.items())
    cluster.node.start_part("kwok", binary("kwok"), *words, env={"HOME": str(home)})


def fake_node(name: str, resources: dict[str, str], labels: dict | None = None, taints: list | None = None) -> dict:
    """Return a Node for kwok: once applied, pods are placed on it by its resources, labels and taints."""
    capacity = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "110", **resources}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": FAKE,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
        },
        "spec": {"taints": taints or []},
        "status": {"capacity": capacity, "allocatable": capacity},
    }
