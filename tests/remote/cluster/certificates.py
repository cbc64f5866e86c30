"""The cluster's keys and certificates, made by openssl, and the kubeconfigs that carry them."""

import base64
import json
from pathlib import Path

from cluster.paths import API_SERVICE_ADDRESS, API_URL, KUBECONFIG, NODE_ADDRESSES, STATE
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
