"""A component of k8s/ on the tests' cluster: one Deployment with its Service, beside overlays/local."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import images
from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.deployment import K8S, PODS_USER, in_namespace, rendered, with_component
from cluster.kubectl import Kubectl, a_namespace
from cluster.paths import STATE


@dataclass(frozen=True)
class Component:
    """A component that runs. name: of its Deployment and Service. pod: the name of its ready pod."""

    cluster: Cluster
    name: str
    namespace: str
    pod: str

    def in_pod(self, command: str) -> str:
        """Return what a shell command says in the pod, whether it fails or not."""
        words = ("exec", self.pod, "--", "sh", "-c", f"{command} 2>&1 || true")
        return self.cluster.kubectl(f"--namespace={self.namespace}", *words)

    @contextmanager
    def forwarded(self, port: int) -> Iterator[str]:
        """Forward a free port of this machine to the Service's, as the documents say; yield its address."""
        words = [binary("kubectl"), f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.namespace}"]
        words += ["port-forward", f"service/{self.name}", f":{port}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            yield f"http://{process.stdout.readline().split()[2]}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def running(
    cluster: Cluster, name: str, image: str, k8s: Path, fill: Callable[[Path], None], more: Iterable[dict] = ()
) -> Iterator[Component]:
    """Run a component until the block ends; the controller does not run.

    image: the Dockerfile's target. k8s: an empty folder for a copy of k8s/. fill: puts results into the volume
    `outputs`, whose folder it gets. more: objects that it needs besides, without a namespace, such as a Secret.
    """
    cluster.carry_in(images.project_image(image))
    namespace = f"vlmflow-{name}"
    volumes = STATE / "volumes" / namespace
    shutil.rmtree(volumes, ignore_errors=True)
    for volume in ("cache", "outputs", "controller-state"):
        (volumes / volume).mkdir(parents=True)
    fill(volumes / "outputs")
    for place in [volumes / "outputs", *(volumes / "outputs").rglob("*")]:
        os.chown(place, PODS_USER, PODS_USER, follow_symlinks=False)
    objects = in_namespace(cluster, namespace, volumes, overlay=with_component(k8s, "local", name))
    without = [one for one in objects if (one["kind"], one["metadata"]["name"]) != ("Deployment", "controller")]
    with cluster.having(*(one for one in without if "namespace" not in one["metadata"])):
        for one in more:
            cluster.apply(one, namespace)
        cluster.apply([one for one in without if "namespace" in one["metadata"]])
        cluster.kubectl(f"--namespace={namespace}", "rollout", "status", f"deployment/{name}", "--timeout=240s")
        (found,) = cluster.get("pods", namespace=namespace, labels=f"app.kubernetes.io/name={name}")["items"]
        yield Component(cluster, name, namespace, found["metadata"]["name"])


def accepted(cluster: Kubectl, name: str, objects: Iterable[dict], template: dict) -> int:
    """Let the API server check a component's objects and its pod, under the base's pod security; create none.

    name: of the component. objects: its own. template: of its pod. Returns how many were accepted; one more than there
    are is all.
    """
    labels = next(one for one in rendered(K8S / "base") if one["kind"] == "Namespace")["metadata"]["labels"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    pod["spec"] = template["spec"] | {"serviceAccountName": "default"}
    namespace = f"vlmflow-{name}-checked"
    with cluster.having(a_namespace(namespace, labels)):
        given = {"apiVersion": "v1", "kind": "List", "items": [*objects, pod]}
        for one in given["items"]:
            one["metadata"]["namespace"] = namespace
        words = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"]
        return cluster.kubectl(*words, input=json.dumps(given)).count("serverside-applied")
