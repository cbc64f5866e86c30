"""The project's objects on a cluster, as from `kubectl apply -k k8s/overlays/local`, in any namespace."""

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.images import project_image
from cluster.kubectl import Kubectl
from cluster.shell import run

K8S = Path(__file__).parents[3] / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
PODS_USER = 1000


def rendered(folder: Path) -> list[dict]:
    """Return the objects that a kustomization makes."""
    return list(yaml.safe_load_all(_text(folder)))


@functools.cache
def _text(folder: Path) -> str:
    return run(binary("kubectl"), "kustomize", folder)


def with_instance(folder: Path, overlay: str, k8s: Path = K8S) -> Path:
    """Write an overlay that makes an instance `ann` of another overlay, and return its folder."""
    names = {"resources": f"overlays/{overlay}", "components": "components/instance"}
    folder.mkdir(parents=True, exist_ok=True)
    kustomization = {key: [os.path.relpath(k8s / name, folder)] for key, name in names.items()}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def with_component(folder: Path, overlay: str, *components: str) -> Path:
    """Copy k8s/ into an empty folder, add components to an overlay of the copy, and return the overlay's folder."""
    shutil.copytree(K8S, folder, dirs_exist_ok=True)
    file = folder / "overlays" / overlay / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    kustomization.setdefault("components", []).extend(f"../../components/{component}" for component in components)
    file.write_text(yaml.safe_dump(kustomization))
    return file.parent


def in_namespace(cluster: Kubectl, namespace: str, volumes: Path, overlay: Path = K8S / "overlays/local") -> list[dict]:
    """Return the objects of overlays/local, or of one upon it, for another namespace.

    volumes: a folder, in which this machine's cluster gets one for each claim; another cluster uses its default
    storage class.
    """
    own = isinstance(cluster, Cluster)
    objects = [one for one in rendered(overlay) if own or one["kind"] != "PersistentVolume"]
    for one in objects:
        metadata, kind = one["metadata"], one["kind"]
        if "namespace" in metadata:
            metadata["namespace"] = namespace
        for subject in one.get("subjects", []):
            subject["namespace"] = namespace
        if kind in ("Namespace", "ClusterRole", "ClusterRoleBinding", "PersistentVolume"):
            metadata["name"] = metadata["name"].replace("vlmflow", namespace)
        if kind == "ClusterRoleBinding":
            one["roleRef"]["name"] = one["roleRef"]["name"].replace("vlmflow", namespace)
        if kind == "PersistentVolume":
            one["spec"]["hostPath"]["path"] = str(volumes / Path(one["spec"]["hostPath"]["path"]).name)
        if kind == "PersistentVolumeClaim":
            one["spec"] |= {"volumeName": f"{namespace}-{metadata['name']}"} if own else {}
            if not own:
                del one["spec"]["storageClassName"], one["spec"]["volumeName"]
                one["spec"]["accessModes"] = ["ReadWriteOnce"]  # all that many single-node clusters give
    return objects


@contextmanager
def having_given(cluster: Kubectl, namespace: str, volumes: Path) -> Iterator[list[dict]]:
    """Apply what belongs to no namespace, and the namespace, as a cluster's administrator would.

    volumes: as `in_namespace` takes it. Returns the objects of the namespace.
    """
    for name in ("cache", "outputs", "controller-state"):
        (volumes / name).mkdir(parents=True, exist_ok=True)
        os.chown(volumes / name, PODS_USER, PODS_USER)
    objects = in_namespace(cluster, namespace, volumes)
    with cluster.having(*(one for one in objects if "namespace" not in one["metadata"])):
        yield [one for one in objects if "namespace" in one["metadata"]]


@contextmanager
def deployed(cluster: Kubectl, namespace: str, volumes: Path) -> Iterator[list[dict]]:
    """Create the objects of overlays/local in a namespace, and delete them at the end. Returns those in it.

    volumes: as `in_namespace` takes it.
    """
    with having_given(cluster, namespace, volumes) as objects:
        cluster.apply(objects)
        yield objects


@contextmanager
def deployed_on_first_node(cluster: Cluster, namespace: str, volumes: Path, images: list[str]) -> Iterator[list[dict]]:
    """Do the same with two nodes: the controller runs on the first one, and the second one's cores are for rules.

    images: the Dockerfile's targets that the nodes get. Returns the objects once the controller runs.
    """
    second = cluster.add_node()
    for target in images:
        cluster.carry_in(project_image(target))
    with ExitStack() as stack:
        with cluster.cordoned(second):
            objects = stack.enter_context(deployed(cluster, namespace, volumes))
            words = ("rollout", "status", "deployment/controller", "--timeout=240s")
            cluster.kubectl(f"--namespace={namespace}", *words)
        yield objects
