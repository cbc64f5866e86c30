"""The demo in pods, with targets in S3 and Snakemake outside the cluster, as on a laptop; its training is slow."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.addons import S3, start_s3
from cluster.cluster_workflow import THREADS, ClusterWorkflow
from vlmflow.core.files import sha256_of
from workflow_runs import RUN, checkout

BUCKET = "vlmflow-targets"


@dataclass
class Laptop:
    """A checkout outside the cluster. bucket: the folder of the targets' bucket, as this machine sees it."""

    checkout: Path
    bucket: Path
    environment: dict[str, str]

    def run(self, target: str) -> str:
        """Run Snakemake with the S3 profile to its end and return its output."""
        call = [sys.executable, "-m", "snakemake", "--profile", "profiles/kubernetes-s3", *THREADS]
        call += ["--configfile", "profiles/kubernetes/stores.yaml", "my-run.yaml", "quick.yaml"]
        call += ["--config", "stores={runs: /outputs/runs-s3, pictures: /cache/pictures-s3}"]
        done = subprocess.run(
            [*call, "--", target],
            cwd=self.checkout,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def laptop(project: ClusterWorkflow, tmp_path_factory: pytest.TempPathFactory) -> Laptop:
    """A laptop's checkout with the demo's settings, and a bucket."""
    server: S3 = start_s3(project.cluster)
    bucket = server.folder / BUCKET
    bucket.mkdir()
    laptops = checkout(tmp_path_factory.mktemp("laptop") / "checkout")
    for name, target in (("run.yaml", "my-run.yaml"), ("quick.yaml", "quick.yaml")):
        (laptops / target).write_bytes((project.checkout / name).read_bytes())
    keys = {
        "VLMFLOW_BUCKET": BUCKET,
        "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": server.endpoint,
        "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": server.access_key,
        "SNAKEMAKE_STORAGE_S3_SECRET_KEY": server.secret_key,
    }
    return Laptop(laptops, bucket, project.environment | keys)


def test_the_workflow_from_a_laptop_gives_the_same_rows(project: ClusterWorkflow, laptop: Laptop, demo: Path) -> None:
    project.forget_pods()
    with project.watched():
        said = laptop.run("data/fire/train.jsonl")
    assert "7 of 7 steps" in said
    assert len(project.pods) == 7
    assert sha256_of(laptop.bucket / "data/fire/train.jsonl") == sha256_of(demo / "data/fire/train.jsonl")
    assert "Nothing to be done" in laptop.run("data/fire/train.jsonl")


@pytest.mark.slow
def test_the_workflow_from_a_laptop_gives_the_same_weights(laptop: Laptop, demo: Path) -> None:
    laptop.run(f"merged/{RUN}")
    assert stored(laptop, f"merged/{RUN}", "*.safetensors") == digests_in(demo / "merged" / RUN, "*.safetensors")
    assert "Nothing to be done" in laptop.run(f"merged/{RUN}")


def digests_in(folder: Path, names: str) -> dict[str, str]:
    """Return the digests of a folder's files that have such names."""
    found = {file.relative_to(folder).as_posix(): sha256_of(file) for file in folder.rglob(names)}
    assert found
    return found


def stored(laptop: Laptop, folder: str, names: str) -> dict[str, str]:
    """Return the same of a folder in the bucket, from the objects that its manifest names with these digests."""
    files = json.loads((laptop.bucket / folder / ".manifest.json").read_text())["files"]
    files = {name: file for name, file in files.items() if Path(name).match(names)}
    found = {name: sha256_of(laptop.bucket / file["key"]) for name, file in files.items()}
    assert found == {name: file["sha256"] for name, file in files.items()}
    return found


def test_the_storage_keys_are_stored_nowhere(project: ClusterWorkflow, laptop: Laptop) -> None:
    secret = laptop.environment["SNAKEMAKE_STORAGE_S3_SECRET_KEY"]
    kept = project.cluster.get("secrets", namespace=project.namespace)["items"]
    assert {each["metadata"]["name"] for each in kept} <= {"hf-token"}
    assert secret not in json.dumps(project.pods)
    places = (project.volumes, laptop.bucket, laptop.checkout)
    files = [path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
