"""The tests' own cluster: one control plane and up to two nodes, which start in seconds and leave no trace."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from cluster import control_plane, image_store, machine, network
from cluster.binaries import COMPONENTS, binary
from cluster.kubectl import Kubectl
from cluster.node import KUBELET_FOLDER, Node
from cluster.paths import KUBECONFIG, STATE
from cluster.processes import pid_of
from cluster.shell import alone, wait_for
from vlmflow.core.errors import VlmflowError

MADE_KUBELET_FOLDER = STATE / "made-kubelet-folder"


class Cluster(Kubectl):
    """The cluster of this machine: there is only one."""

    def __init__(self) -> None:
        super().__init__(KUBECONFIG)
        self.node = Node("node-a")
        self.second_node = Node("node-b")

    def running(self) -> bool:
        """Say whether the cluster is there, with its API server."""
        return self.node.running() and pid_of("node-a.kube-apiserver") is not None

    def up(self) -> None:
        """Start the control plane and the first node, and wait until pods can run; do nothing if it runs.

        Builds and installs what the machine lacks (minutes, once). Raises VlmflowError if the machine cannot run it.
        """
        machine.prepare()
        for component in COMPONENTS:
            binary(component)
        image_store.pause_archive()
        with alone("cluster"):
            if self.running():
                return
            self._down()  # what a killed run left
            network.refuse_taken_addresses()
            STATE.mkdir(parents=True)
            control_plane.make_all()
            if not KUBELET_FOLDER.exists():
                MADE_KUBELET_FOLDER.touch()
            self.node.boot(self.node)
            for part in control_plane.PARTS:
                self.node.start_part(part, *control_plane.command(part))
            self.node.start_containerd()
            image_store.carry_in(self.node, image_store.pause_archive())
            wait_for("the API server is ready", control_plane.ready)
            self.node.join()
            self._wait_until_ready(self.node)
            wait_for("the default service account", lambda: self.get("serviceaccount", "default", "default"))

    def down(self) -> None:
        """End every process of the cluster and restore the machine; the builds remain in the cache."""
        with alone("cluster"):
            self._down()

    def add_node(self) -> Node:
        """Start the second node, and return it when pods can run on it; nothing if it is there."""
        with alone("cluster"):
            if not self.second_node.running():
                self.second_node.stop()
                try:
                    self.second_node.boot(self.node)
                    self.second_node.start_containerd()
                    image_store.carry_in(self.second_node, image_store.pause_archive())
                    self.second_node.join()
                    self._wait_until_ready(self.second_node)
                except BaseException:
                    self.second_node.stop()  # the next caller shall not take a node that never was ready
                    raise
        return self.second_node

    def remove_node(self) -> None:
        """End the second node in order and delete its Node object; nothing if it is not there."""
        with alone("cluster"):
            self.second_node.stop()
        name = self.second_node.name
        self.kubectl("delete", "node", name, "--ignore-not-found")
        # No kubelet reports their end any more: without force they would remain until a garbage collection.
        stays = (f"--field-selector=spec.nodeName={name}", "--force", "--grace-period=0", "--ignore-not-found")
        self.kubectl("delete", "pods", "--all-namespaces", *stays)

    @contextmanager
    def cordoned(self, node: Node) -> Iterator[None]:
        """Keep new pods off a node while the block runs."""
        self.kubectl("cordon", node.name)
        try:
            yield
        finally:
            self.kubectl("uncordon", node.name)

    def carry_in(self, image: str) -> None:
        """Bring an image of buildah's store (images.project_image) to every node that runs."""
        with alone("image-stores"):
            for node in (self.node, self.second_node):
                if node.running():
                    image_store.carry_image(node, image)

    def kill(self, pod: dict) -> None:
        """Kill everything in a pod's container, like a crash; the API server learns of it afterwards."""
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        node = next(each for each in (self.node, self.second_node) if each.name == pod["spec"]["nodeName"])
        node.ctr("tasks", "kill", "--signal", "SIGKILL", "--all", container)

    def start(self, part: str) -> None:
        """Start a part of the control plane (control_plane.PARTS) again, and wait until the API server answers."""
        self.node.start_part(part, *control_plane.command(part))
        if part in ("etcd", "kube-apiserver"):
            wait_for("the API server is ready", control_plane.ready)

    def stop(self, part: str) -> None:
        """End a part of the control plane (control_plane.PARTS); the others continue."""
        self.node.stop_part(part)

    def _forget(self, names: list[str]) -> None:
        if self.running():  # the last tests take it down
            super()._forget(names)

    def _wait_until_ready(self, node: Node) -> None:
        """Wait until pods can run on a node. Raises VlmflowError with the end of its kubelet's log after a minute."""

        def ready() -> bool:
            node.keep_kubelet()
            conditions = self.get("node", node.name)["status"]["conditions"]
            return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

        try:
            wait_for(f"{node.name} is Ready", ready)
        except VlmflowError as error:
            for part in ("containerd", "kube-proxy", "kubelet"):
                error.add_note(node.report(part))
            raise

    def _down(self) -> None:
        if not STATE.exists():
            return
        with ThreadPoolExecutor() as pool:
            list(pool.map(Node.stop, (self.second_node, self.node)))
        network.disconnect()
        if MADE_KUBELET_FOLDER.exists():
            KUBELET_FOLDER.rmdir()
        shutil.rmtree(STATE)
