"""A node: its own namespaces and cgroup, with containerd, kubelet and kube-proxy, and their configuration files."""

import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path

from cluster import cgroups, network
from cluster.binaries import binary
from cluster.cgroups import root_of
from cluster.control_plane import PKI, write_kubeconfig
from cluster.paths import CACHE, DNS_SERVICE_ADDRESS, KUBECONFIG, NODE_ADDRESSES, POD_NETWORK, STATE
from cluster.processes import children, log_of, pid_of, spawn, stop
from cluster.shell import run, wait_for
from vlmflow.core.errors import VlmflowError

PAUSE_IMAGE = "localhost/vlmflow/pause:1"


def containerd_config(folder: Path, image_store: Path) -> str:
    """Return containerd's configuration (containerd-config.toml(5), version 2).

    folder: sockets and state, lost with the node; image_store: what it keeps from one start to the next.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    runc = f"{cri}.containerd.runtimes.runc"
    return f"""
version = 2
root = "{image_store}"
state = "{folder}/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{folder}/containerd.sock"
[debug]
level = "warn"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
# Without CAP_SYS_RESOURCE no process may lower its OOM score.
restrict_oom_score_adj = true
[{cri}.cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/network"
[{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[{runc}]
runtime_type = "io.containerd.runc.v2"
[{runc}.options]
SystemdCgroup = false
"""


def kubelet_config(node: str, folder: Path, pki: Path) -> dict:
    """Return the kubelet's configuration (kubelet.config.k8s.io/v1beta1)."""
    never = {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%"}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESSES[node],
        "healthzBindAddress": "127.0.0.1",
        "tlsCertFile": str(pki / f"{node}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": root_of(node),
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "volumePluginDir": str(folder / "volume-plugins"),
        "resolvConf": str(folder / "resolv.conf"),
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "clusterDomain": "cluster.local",
        # Ignore the machine's disk: a full one would evict pods and delete images.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", **never},
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
    }


def kube_proxy_config(node: str) -> dict:
    """Return kube-proxy's configuration (kubeproxy.config.k8s.io/v1alpha1)."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(KUBECONFIG)},
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": node,
        "bindAddress": NODE_ADDRESSES[node],
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # Pods share one flat network: without masquerading, an answer would bypass its service's rewriting.
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s", "localhostNodePorts": False},
        # These belong to the whole machine, so they remain unchanged.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


KUBELET_FOLDER = Path("/var/lib/kubelet")
"""The kubelet always uses this path for device plugins: each node mounts its own folder over it."""


class Node:
    """One node of the cluster; the first one's namespaces hold the control plane too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = NODE_ADDRESSES[name]
        self.folder = STATE / name
        self.image_store = CACHE / "image-stores" / name

    @property
    def pid(self) -> int:
        """The id of the node's process 1 on the machine. Raises VlmflowError if the node is down."""
        holder = pid_of(f"{self.name}.node")
        inside = children(holder) if holder else []
        if not inside:
            raise VlmflowError(f"{self.name} is not running", "start it: python -m cluster up")
        return inside[0]

    def running(self) -> bool:
        """Return whether the node's process 1 exists."""
        return pid_of(f"{self.name}.node") is not None

    def enter(self, *argv: object) -> list[object]:
        """Return the command line that runs `argv` as a process of the node."""
        return ["nsenter", "--target", self.pid, "--mount", "--net", "--ipc", "--pid", "--", *argv]

    def boot(self, first: "Node") -> None:
        """Make the namespaces, the links and the configuration.

        first: the node whose namespaces the machine's link leads to (itself for the first).
        """
        self.folder.mkdir(parents=True)
        for name in ("log", "sysctl"):
            (self.folder / name).mkdir()
        KUBELET_FOLDER.mkdir(exist_ok=True)
        cgroups.make(self.name)
        spaces = ("--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private")
        init = Path(__file__).with_name("node_init.py")
        spawn(f"{self.name}.node", ["unshare", *spaces, sys.executable, "-I", init, self.folder])
        wait_for(f"{self.name} is made", (self.folder / "ready").exists, pause=0.01)
        network.connect(self.name, self.pid, first.pid)
        network.write_pod_network(self.name, self.folder)
        write_kubeconfig(self.folder / "kubeconfig", self.name)
        (self.folder / "resolv.conf").touch()
        (self.folder / "containerd.toml").write_text(containerd_config(self.folder, self.image_store))
        (self.folder / "kubelet.yaml").write_text(json.dumps(kubelet_config(self.name, self.folder, PKI)))
        (self.folder / "kube-proxy.yaml").write_text(json.dumps(kube_proxy_config(self.name)))

    def start_containerd(self) -> None:
        """Start containerd and wait until it answers."""
        self.start_part("containerd", "containerd", "--config", self.folder / "containerd.toml")
        wait_for(f"{self.name}'s containerd answers", lambda: self.ctr("version"))

    def join(self) -> None:
        """Start kube-proxy, then the kubelet, so that services' addresses work before the first pod."""
        self.start_part("kube-proxy", binary("kube-proxy"), f"--config={self.folder / 'kube-proxy.yaml'}")
        self.start_kubelet()

    def start_part(self, part: str, *argv: object, env: dict[str, str] | None = None) -> None:
        """Start a long-running process in the node's namespaces, known as NODE.PART.

        env: variables that override this process's own.
        """
        spawn(f"{self.name}.{part}", self.enter(*argv), env)

    def stop_part(self, part: str) -> None:
        """End what start_part started, by SIGKILL after 3 s: an API server waits a minute for its watchers."""
        stop(f"{self.name}.{part}", limit=3)

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        flags = {
            "config": self.folder / "kubelet.yaml",
            "kubeconfig": self.folder / "kubeconfig",
            "root-dir": self.folder / "kubelet",
            "cert-dir": self.folder / "kubelet-certificates",
            "hostname-override": self.name,
            "node-ip": self.address,
        }
        self.start_part("kubelet", binary("kubelet"), *(f"--{key}={value}" for key, value in flags.items()))

    def keep_kubelet(self) -> None:
        """Start the kubelet again if it has ended.

        On real nodes systemd does this: a kubelet ends itself where it counts on a new start, for example when its
        node is registered too slowly (kubernetes, pkg/volume/csi/csi_plugin.go, "Failed to initialize CSINode").
        """
        if pid_of(f"{self.name}.kubelet") is None:
            self.start_kubelet()

    def report(self, part: str) -> str:
        """Return whether a part of the node runs, and the last lines of its log."""
        lines = log_of(f"{self.name}.{part}").read_text(errors="replace").splitlines()
        state = "runs" if pid_of(f"{self.name}.{part}") else "has ended"
        return "\n".join([f"{self.name}'s {part} {state}; the end of its log:", *lines[-20:]])

    def stop_kubelet(self) -> None:
        """End the kubelet; pods continue, as on a node that no longer answers."""
        self.stop_part("kubelet")

    def kill(self) -> None:
        """Lose the node as in a power failure: all of its processes, including pods, end at once."""
        stop(f"{self.name}.node", signal.SIGKILL)
        cgroups.remove(self.name)

    def stop(self) -> None:
        """Shut down the node properly: no containers remain recorded in its image store."""
        if self.running():
            self.stop_kubelet()
            with contextlib.suppress(VlmflowError):
                self._forget_containers()
            self.stop_part("containerd")
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctr(self, *argv: object) -> str:
        """Run containerd's ctr in the namespace that the kubelet uses, and return what it prints."""
        return run(*self.enter("ctr", "--address", self.folder / "containerd.sock", "--namespace", "k8s.io", *argv))

    def _forget_containers(self) -> None:
        if tasks := self.ctr("tasks", "list", "--quiet").split():
            self.ctr("tasks", "delete", "--force", *tasks)
        if containers := self.ctr("containers", "list", "--quiet").split():
            self.ctr("containers", "delete", *containers)
