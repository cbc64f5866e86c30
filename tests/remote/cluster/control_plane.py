"""etcd, API server, controller manager and scheduler: the command line of each, in the first node's namespaces."""

import json
import ssl
import urllib.request

from cluster.binaries import binary
from cluster.certificates import PKI
from cluster.paths import API_URL, KUBECONFIG, NODE_ADDRESSES, SERVICE_NETWORK, STATE

PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADDRESS = NODE_ADDRESSES["node-a"]
ETCD = "http://127.0.0.1:2379"
PEER = "http://127.0.0.1:2380"

# With the default (40 s) every test of a lost node would wait longer.
SECONDS_TO_NOTICE_A_LOST_NODE = 8


def command(part: str) -> list[object]:
    """Return the command line of one of PARTS."""
    flags = {
        "etcd": _etcd,
        "kube-apiserver": _apiserver,
        "kube-controller-manager": _controller_manager,
        "kube-scheduler": _scheduler,
    }
    return [binary(part), *flags[part]()]


def ready() -> bool:
    """Say whether the API server answers that it is ready."""
    context = ssl.create_default_context(cafile=PKI / "ca.crt")
    context.load_cert_chain(PKI / "admin.crt", PKI / "admin.key")
    # No proxy of the machine's environment may be between the tests and their own cluster.
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(f"{API_URL}/readyz", timeout=2) as answer:
        return answer.status == 200


def _etcd() -> list[object]:
    return [
        f"--data-dir={STATE / 'etcd'}",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={PEER}",
        f"--initial-advertise-peer-urls={PEER}",
        f"--initial-cluster=default={PEER}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _apiserver() -> list[object]:
    return [
        f"--etcd-servers={ETCD}",
        f"--bind-address={ADDRESS}",
        f"--advertise-address={ADDRESS}",
        "--secure-port=6443",
        f"--tls-cert-file={PKI / 'apiserver.crt'}",
        f"--tls-private-key-file={PKI / 'apiserver.key'}",
        f"--client-ca-file={PKI / 'ca.crt'}",
        f"--service-account-key-file={PKI / 'tokens.pub'}",
        f"--service-account-signing-key-file={PKI / 'tokens.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={PKI / 'admin.crt'}",
        f"--kubelet-client-key={PKI / 'admin.key'}",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def _controller_manager() -> list[object]:
    # With shared credentials and a higher rate, the default service account exists at once.
    return [
        f"--kubeconfig={KUBECONFIG}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--service-account-private-key-file={PKI / 'tokens.key'}",
        f"--root-ca-file={PKI / 'ca.crt'}",
        f"--cluster-signing-cert-file={PKI / 'ca.crt'}",
        f"--cluster-signing-key-file={PKI / 'ca.key'}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--allocate-node-cidrs=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--pvclaimbinder-sync-period=1s",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={SECONDS_TO_NOTICE_A_LOST_NODE}s",
    ]


def _scheduler() -> list[object]:
    config = STATE / "scheduler.yaml"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": str(KUBECONFIG)},
                "leaderElection": {"leaderElect": False},
            }
        )
    )
    return [f"--config={config}", "--bind-address=127.0.0.1"]
