"""The demo on the tests' cluster, called as a person would, every pod that it had, and its training in two pods."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cluster.addons import start_dns
from cluster.binaries import binary
from cluster.cluster import Cluster
from cluster.deployment import PODS_USER
from cluster.shell import wait_for
from workflow_runs import QUICK, ROOT, RUN, copy_folder

TOKEN = "hf_" + "TheTokenThatMustBeNowhere"
"""The hub's token on the cluster."""

DEMO = "/cache/demo"
"""Where the pods have sample and tiny model."""

TWO_CORES = ("train_smoke", "train_model", "verify_merged")
"""Rules whose pods ask for both cores of the second node; the pods of all others ask for one, and run side by side."""

ONE_CORE = (
    *("fetch_model", "fetch_model_files", "resolve_images", "convert_rows", "validate_sharegpt"),
    *("measure_lengths", "fit_rows", "choose_rows", "merge_weights", "verify_tensors"),
)
THREADS = ["--max-threads", "2", "--set-threads", *(f"{rule}=1" for rule in ONE_CORE)]


@dataclass
class ClusterWorkflow:
    """A namespace with the project in it.

    volumes: the folder of its volumes, as this machine sees them; checkout: the person's; instance: whose it is, if the
    namespace has several.
    """

    cluster: Cluster
    namespace: str
    volumes: Path
    checkout: Path
    instance: str = ""
    pods: dict[str, dict] = field(default_factory=dict)
    """Every pod of a rule that was seen, by name, in its last state."""

    @property
    def targets(self) -> Path:
        """The storage prefix of profiles/kubernetes."""
        return self.volumes / "outputs" / "targets"

    def bring(self, demo: Path) -> None:
        """Put a demo folder (workflow_runs.make_demo_folder) onto the cache volume, its settings into the checkout."""
        place = self.volumes / "cache" / "demo"
        copy_folder(demo, place)
        settings = yaml.safe_load((ROOT / "profiles" / "demo" / "run.yaml").read_text())
        settings["models"]["tiny"]["source"] = f"{DEMO}/tiny-model"
        for dataset in settings["datasets"].values():
            dataset |= {split: f"{DEMO}/{dataset[split]}" for split in ("train", "test")}
            dataset["image_roots"] = [f"{DEMO}/{root}" for root in dataset["image_roots"]]
        (self.checkout / "run.yaml").write_text(yaml.safe_dump(settings))
        (self.checkout / "quick.yaml").write_text(QUICK)
        for file in [place, *place.rglob("*")]:
            os.chown(file, PODS_USER, PODS_USER, follow_symlinks=False)

    def words(self, *more: str, targets: Sequence[str] = (f"merged/{RUN}",)) -> list[str]:
        """Return the words of `vlmflow cluster run` for the demo. more: options of Snakemake."""
        settings, quick = (str(self.checkout / name) for name in ("run.yaml", "quick.yaml"))
        return [settings, *targets, "--also", quick, *THREADS, *more]

    def small(self, *words: str) -> list[str]:
        """Return the words of `vlmflow cluster run` for a target or options alone, without the demo's settings."""
        return [str(self.checkout / "profiles" / "kubernetes" / "stores.yaml"), *words]

    def ask(self, action: str, *words: str) -> list[str]:
        """Return the command line of `vlmflow cluster` ACTION; it needs our `environment`."""
        return [sys.executable, "-m", "vlmflow.command", "cluster", action, "--namespace", self.namespace, *words]

    @property
    def environment(self) -> dict[str, str]:
        """The environment that points the project's commands to this cluster."""
        own = {"KUBECONFIG": str(self.cluster.kubeconfig), "KUBECTL": str(binary("kubectl"))}
        own["PYTHONPATH"] = str(self.checkout / "scripts")
        return os.environ | own | {"VLMFLOW_INSTANCE": self.instance}

    def run(self, *words: str, ends_well: bool = True) -> str:
        """Run Snakemake in the controller to its end, from outside, and return its output.

        Raises AssertionError with the output if it does not end as expected.
        """
        with self.watched():
            done = subprocess.run(
                self.ask("run", *words), capture_output=True, text=True, env=self.environment, check=False
            )
        said = done.stdout + done.stderr
        assert (done.returncode == 0) == ends_well, said[-8000:]
        return said

    def in_controller(self, *command: str) -> str:
        """Run a command in the controller's container."""
        controller = f"deployment/controller-{self.instance}".removesuffix("-")
        return self.cluster.kubectl(f"--namespace={self.namespace}", "exec", controller, "--", *command)

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

    def forget_pods(self) -> None:
        """Forget the seen pods once those of earlier calls are gone, because the next watch would see them again."""
        of_rules = {"namespace": self.namespace, "labels": "vlmflow/rule"}
        wait_for("pods of an earlier call go", lambda: not self.cluster.get("pods", **of_rules)["items"], 120)
        self.pods.clear()

    def rules(self) -> dict[str, list[dict]]:
        """Return the pods that were seen, by their rule."""
        found: dict[str, list[dict]] = {}
        for pod in self.pods.values():
            found.setdefault(pod["metadata"]["labels"]["vlmflow/rule"], []).append(pod)
        return found


def whole_objects(text: str) -> Iterator[dict]:
    """Return the consecutive JSON objects of a text; the last one may be cut off."""
    decoder = json.JSONDecoder()
    with suppress(json.JSONDecodeError):
        while text := text.lstrip():
            found, end = decoder.raw_decode(text)
            text = text[end:]
            yield found


STEPS, BETWEEN = 50, 5
"""Steps of the trainings that others end. A checkpoint comes every BETWEEN."""

TRAIN = f"train: {{max_steps: {STEPS}, checkpoint_steps: {BETWEEN}, evaluation_steps: {BETWEEN}}}"
ONE_NODE = f"runs={{{RUN}: {{nodes: 1, processes: 2, {TRAIN}}}}}"
TWO_NODES = f"runs={{{RUN}: {{nodes: 2, processes: 1, {TRAIN}}}}}"


def begin(project: ClusterWorkflow, shown: Path) -> subprocess.Popen:
    """Start the full training, after a finished run. shown: the file for Snakemake's output."""
    start_dns(project.cluster)
    only = ["--config", TWO_NODES, "--allowed-rules", "train_model"]
    words = project.words(*only, targets=[f"checkpoints/{RUN}/full"])
    with shown.open("wb") as output:
        return subprocess.Popen(project.ask("run", *words), env=project.environment, stdout=output)


def steps(project: ClusterWorkflow) -> list[int]:
    """Return the steps that the trainers have logged so far."""
    files = (project.volumes / "outputs" / "runs" / RUN / "full").glob("*/progress.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if line.get("target") == STEPS and "loss" in line]


def pods(project: ClusterWorkflow) -> list[dict]:
    """Return the group's pods, once all of them run and have made some more steps."""

    def all_run() -> list[dict]:
        found = project.cluster.get("pods", namespace=project.namespace, labels="vlmflow/rule=train_model")["items"]
        found = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return found if [pod["status"]["phase"] for pod in found] == ["Running"] * 2 else []

    found = wait_for("both pods run", all_run, 240, pause=1)
    begun = len(steps(project))
    wait_for("they train", lambda: len(steps(project)) > begun + 3, 240, pause=0.3)
    return sorted(found, key=lambda pod: pod["metadata"]["name"])
