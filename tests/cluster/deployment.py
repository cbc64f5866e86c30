"""The project's own objects on a cluster, as `kubectl apply -k k8s/overlays/local` makes them, in any namespace."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl
from cluster.shell import run

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
PODS_USER = 1000


def rendered(folder: Path) -> list[dict]:
    """Give the objects that a kustomization makes."""
    return list(yaml.safe_load_all(_text(folder)))


@functools.cache
def _text(folder: Path) -> str:
    return run(binary("kubectl"), "kustomize", folder)


def in_namespace(cluster: Kubectl, namespace: str, volumes: Path) -> list[dict]:
    """Give the objects of overlays/local for another namespace.

    volumes: a folder, in which this machine's cluster gets one for each claim; another cluster uses its default
    storage class.
    """
    own = isinstance(cluster, Cluster)
    objects = [one for one in rendered(K8S / "overlays/local") if own or one["kind"] != "PersistentVolume"]
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
def deployed(cluster: Kubectl, namespace: str, volumes: Path) -> Iterator[list[dict]]:
    """Make the objects of overlays/local in a namespace, and take them away in the end. Gives the objects."""
    for name in ("cache", "outputs"):
        (volumes / name).mkdir(parents=True, exist_ok=True)
        os.chown(volumes / name, PODS_USER, PODS_USER)
    objects = in_namespace(cluster, namespace, volumes)
    cluster.apply([one for one in objects if one["kind"] == "Namespace"])
    try:
        cluster.apply(objects)
        yield objects
    finally:
        if not isinstance(cluster, Cluster) or cluster.running():  # the last tests take it down
            cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found")
            for one in objects:
                if "namespace" not in one["metadata"] and one["kind"] != "Namespace":
                    cluster.kubectl("delete", one["kind"], one["metadata"]["name"], "--ignore-not-found")
