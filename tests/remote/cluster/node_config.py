"""The configuration files of a node's containerd, kubelet and kube-proxy."""

from pathlib import Path

from cluster.cgroups import root_of
from cluster.paths import DNS_SERVICE_ADDRESS, KUBECONFIG, NODE_ADDRESSES, POD_NETWORK

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
