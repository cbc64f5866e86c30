"""kubectl with one kubeconfig: the tests' calls to the cluster, their own or another."""

import functools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kubernetes

from cluster.binaries import binary
from cluster.paths import KUBECONFIG
from cluster.shell import run
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster import api


def a_namespace(name: str, labels: dict[str, str] | None = None) -> dict:
    """Return a namespace as an object."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}


def client_of(kubeconfig: Path) -> kubernetes.client.ApiClient:
    """Return the executor's own client of the cluster that a kubeconfig names."""
    settings = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=settings)
    return api.client_of(settings, print, patience=60)


class Kubectl:
    """The cluster that a kubeconfig leads to."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    @functools.cached_property
    def program(self) -> str | Path:
        """The kubectl to run: for another cluster the machine's own, if it has one, to avoid a build."""
        return (None if self.kubeconfig == KUBECONFIG else shutil.which("kubectl")) or binary("kubectl")

    def kubectl(self, *argv: object, input: str | None = None) -> str:
        """Run kubectl and give its standard output. Raises VlmflowError with what it said if it fails."""
        return run(self.program, f"--kubeconfig={self.kubeconfig}", *argv, input=input)

    def get(self, kind: str, name: str | None = None, namespace: str | None = None, labels: str = "") -> dict:
        """Return an object, or without a name the list of a kind's objects, as the API has it.

        namespace: None for the context's own, "*" for all. labels: a selector.
        """
        words: list[object] = [kind, *([name] if name else [])]
        if namespace:
            words += ["--all-namespaces"] if namespace == "*" else [f"--namespace={namespace}"]
        if labels:
            words.append(f"--selector={labels}")
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def apply(self, objects: dict | Iterable[dict] | Path, namespace: str | None = None) -> None:
        """Apply an object, some objects, or a file of them."""
        words = ["apply", *([f"--namespace={namespace}"] if namespace else [])]
        if isinstance(objects, Path):
            self._apply(*words, f"--filename={objects}")
            return
        items = [objects] if isinstance(objects, dict) else list(objects)
        listed = {"apiVersion": "v1", "kind": "List", "items": items}
        self._apply(*words, "--filename=-", input=json.dumps(listed))

    @contextmanager
    def having(self, *objects: dict) -> Iterator[None]:
        """Create objects that belong to no namespace, or namespaces themselves, until the block ends.

        They are created again if they exist, and deleted at the end without waiting: a namespace with pods takes 16 s.
        """
        names = [f"{one['kind']}/{one['metadata']['name']}" for one in objects]
        self.kubectl("delete", *names, "--ignore-not-found")  # leftovers of an earlier call
        self.apply(objects)
        try:
            yield
        finally:
            self._forget(names)

    def _apply(self, *words: object, input: str | None = None) -> None:
        for tries_left in (3, 2, 1, 0):
            try:
                self.kubectl(*words, input=input)
            except VlmflowError as error:  # the quota counted another pod at the same moment
                if not tries_left or "the object has been modified" not in str(error):
                    raise
            else:
                return

    def _forget(self, names: list[str]) -> None:
        self.kubectl("delete", *names, "--ignore-not-found", "--wait=false")

    def set_capacity(self, node: str, resources: dict[str, str]) -> None:
        """Let a node report resources (`{"nvidia.com/gpu": "4"}`) that it does not have, until its kubelet's restart.

        Pods that ask for them are placed by them; inside they find no device.
        """
        status = {"status": {"capacity": resources, "allocatable": resources}}
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
