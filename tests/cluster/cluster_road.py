"""The demo's road on the tests' cluster, asked for as a person does, and every pod that it had."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.deployment import PODS_USER
from roads import QUICK, ROOT, RUN, copy_folder

DEMO = "/cache/demo"
"""Where the pods find sample and tiny model."""


@dataclass
class ClusterRoad:
    """A namespace with the project in it. volumes: the folder of its two volumes, as this machine sees them."""

    cluster: Cluster
    namespace: str
    volumes: Path
    pods: dict[str, dict] = field(default_factory=dict)
    """Every pod of a rule that was seen, by name, as the API had it last."""

    @property
    def targets(self) -> Path:
        """The storage prefix of profiles/kubernetes."""
        return self.volumes / "outputs" / "targets"

    def bring(self, demo: Path) -> None:
        """Put a demo folder (roads.make_demo_folder) onto the cache volume, and its settings beside it."""
        place = self.volumes / "cache" / "demo"
        copy_folder(demo, place)
        settings = yaml.safe_load((ROOT / "profiles" / "demo" / "run.yaml").read_text())
        settings["models"]["tiny"]["source"] = f"{DEMO}/tiny-model"
        for dataset in settings["datasets"].values():
            dataset |= {split: f"{DEMO}/{dataset[split]}" for split in ("train", "test")}
            dataset["image_roots"] = [f"{DEMO}/{root}" for root in dataset["image_roots"]]
        (place / "run.yaml").write_text(yaml.safe_dump(settings))
        (place / "quick.yaml").write_text(QUICK)
        for file in [place, *place.rglob("*")]:
            os.chown(file, PODS_USER, PODS_USER, follow_symlinks=False)

    def words(self, *more: str) -> list[str]:
        """Give Snakemake's arguments for the demo: its settings, and a thread per pod, since the node has two cores."""
        files = ["profiles/kubernetes/stores.yaml", f"{DEMO}/run.yaml", f"{DEMO}/quick.yaml"]
        return ["--configfile", *files, "--max-threads", "1", *more, "--", f"merged/{RUN}"]

    def ask(self, *action: str) -> list[str]:
        """Give the command line of scripts/cluster_controller.py, which `make cluster-run` calls."""
        return [sys.executable, str(ROOT / "scripts/cluster_controller.py"), "--namespace", self.namespace, *action]

    @property
    def environment(self) -> dict[str, str]:
        """The environment that leads the project's commands to this cluster."""
        return os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig), "KUBECTL": str(binary("kubectl"))}

    def run(self, *words: str, ends_well: bool = True) -> str:
        """Run Snakemake in the controller to its end, from outside, and give what it said.

        Raises AssertionError with that where it ends otherwise than told.
        """
        with self.watched():
            done = subprocess.run(
                self.ask("run", "--", *words), capture_output=True, text=True, env=self.environment, check=False
            )
        said = done.stdout + done.stderr
        assert (done.returncode == 0) == ends_well, said[-8000:]
        return said

    def in_controller(self, *command: str) -> str:
        """Run a command in the controller's container."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", "exec", "deployment/controller", "--", *command)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep every state of every rule's pod while the block runs."""
        watch = [str(binary("kubectl")), "get", "pods", "--watch", "--output=json", "--selector=vlmflow/rule"]
        with tempfile.TemporaryFile("w+") as seen:
            process = subprocess.Popen([*watch, f"--namespace={self.namespace}"], stdout=seen, env=self.environment)
            try:
                yield
            finally:
                process.terminate()
                process.wait()
                seen.seek(0)
                for pod in whole_objects(seen.read()):
                    self.pods[pod["metadata"]["name"]] = pod

    def rules(self) -> dict[str, list[dict]]:
        """Give the pods that were seen, by their rule."""
        found: dict[str, list[dict]] = {}
        for pod in self.pods.values():
            found.setdefault(pod["metadata"]["labels"]["vlmflow/rule"], []).append(pod)
        return found


def whole_objects(text: str) -> Iterator[dict]:
    """Give the JSON objects that follow one another in a text; its end may be cut off in the middle of one."""
    decoder = json.JSONDecoder()
    with suppress(json.JSONDecodeError):
        while text := text.lstrip():
            found, end = decoder.raw_decode(text)
            text = text[end:]
            yield found
