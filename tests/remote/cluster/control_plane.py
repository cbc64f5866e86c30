"""etcd, API server, controller manager and scheduler: their command lines, keys, certificates and kubeconfigs."""

import base64
import json
import ssl
import urllib.request
from pathlib import Path

from cluster.binaries import binary
from cluster.paths import API_SERVICE_ADDRESS, API_URL, KUBECONFIG, NODE_ADDRESSES, SERVICE_NETWORK, STATE
from cluster.shell import run

PKI = STATE / "pki"
DAYS = 30


def make_all() -> None:
    """Make the authority, the API server's, the administrator's and every node's certificate, and the token key."""
    PKI.mkdir(parents=True, mode=0o700)
    _key("ca")
    authority = ("-subj", "/CN=vlmflow-tests", "-days", DAYS, "-out", PKI / "ca.crt")
    run("openssl", "req", "-x509", "-new", "-key", PKI / "ca.key", *authority)
    names = [f"DNS:kubernetes{rest}" for rest in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    hosts = [f"IP:{host}" for host in ("127.0.0.1", NODE_ADDRESSES["node-a"], API_SERVICE_ADDRESS)]
    _signed("apiserver", "/CN=kube-apiserver", [*names, *hosts])
    _signed("admin", "/O=system:masters/CN=admin")
    for node, address in NODE_ADDRESSES.items():
        _signed(node, f"/O=system:nodes/CN=system:node:{node}", [f"IP:{address}", f"DNS:{node}"])
    _key("tokens")
    run("openssl", "ec", "-in", PKI / "tokens.key", "-pubout", "-out", PKI / "tokens.pub")
    write_kubeconfig(KUBECONFIG, "admin")


def write_kubeconfig(path: Path, user: str) -> None:
    """Write a kubeconfig, readable only by root, with which `user` (a certificate's name) reaches the API server."""

    def inline(name: str) -> str:
        return base64.b64encode((PKI / name).read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": API_URL, "certificate-authority-data": inline("ca.crt")}}],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": inline(f"{user}.crt"),
                    "client-key-data": inline(f"{user}.key"),
                },
            }
        ],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user, "namespace": "default"}}],
        "current-context": "tests",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))


def _key(name: str) -> None:
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", PKI / f"{name}.key")


def _signed(name: str, subject: str, alternatives: list[str] | None = None) -> None:
    _key(name)
    extensions = PKI / f"{name}.ext"
    extensions.write_text(
        "keyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage=serverAuth,clientAuth\n"
        + (f"subjectAltName={','.join(alternatives)}\n" if alternatives else "")
    )
    request = PKI / f"{name}.csr"
    run("openssl", "req", "-new", "-key", PKI / f"{name}.key", "-subj", subject, "-out", request)
    signer = ("-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key", "-CAcreateserial", "-days", DAYS)
    run("openssl", "x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", PKI / f"{name}.crt")


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
