"""The whole demo in jobs of Slurm, from raw rows to verified merged weights; what would never start is refused."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.slurm_cluster import SlurmCluster
from slurm.slurm_workflow import call, jobs
from vlmflow.core.files import sha256_of
from workflow_runs import RUN, copy_folder

ONE_JOB_EACH = {"data", "train_smoke", "train_model", "merge_weights", "verify_tensors", "verify_merged"}
"""Rules that have jobs of their own; all connected stages of the data share one. Others ran on the login node."""

TARGETS = {
    *("data/fire/train.jsonl", "data/fire/val.jsonl", "data/fire/test.jsonl"),
    *(f"fitted/{RUN}/train.jsonl", f"fitted/{RUN}/val.jsonl"),
    f"checkpoints/{RUN}/full/adapter_model.safetensors",
    *(f"merged/{RUN}/model-0000{number}-of-00002.safetensors" for number in (1, 2)),
}
"""Files without times or places: the same bytes wherever they are made, by as many threads."""


@dataclass(frozen=True)
class Demo:
    """The folder in which the demo ran; what Snakemake said; its jobs by rule, as Slurm knows them."""

    folder: Path
    said: str
    jobs: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def there(own_slurm: SlurmCluster, fresh_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Run the demo; its trainings have GPUs that nobody uses."""
    own_slurm.up()
    folder = copy_folder(fresh_demo, tmp_path_factory.mktemp("slurm") / "demo")
    words = call(folder, "--", f"merged/{RUN}", train_smoke={"gpu": 1}, train_model={"gpu": 2})
    done = subprocess.run(words, env=own_slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = sorted(jobs(own_slurm, folder).values(), key=lambda job: int(job["JobId"]))
    by_rule = {job["JobName"].partition(":")[0]: job for job in found}
    assert len(found) == len(by_rule)
    return Demo(folder, done.stdout + done.stderr, by_rule)


def test_the_weights_are_the_local_runs(there: Demo, local_runs: tuple[Path, Path]) -> None:
    digests = [{name: sha256_of(folder / name) for name in TARGETS} for folder in (there.folder, local_runs[0])]
    assert digests[0] == digests[1]


def test_what_trains_and_proves_has_jobs_of_its_own_with_what_it_asks_for(there: Demo) -> None:
    assert there.jobs.keys() == ONE_JOB_EACH
    assert {job["JobState"] for job in there.jobs.values()} == {"COMPLETED"}
    gpus = {rule: job["TresPerJob"] for rule, job in there.jobs.items() if "TresPerJob" in job}
    assert gpus == {"train_smoke": "gres:gpu:1", "train_model": "gres:gpu:2"}
    in_gpu = {rule for rule, job in there.jobs.items() if job["Partition"] == "gpu"}
    assert in_gpu == {"train_smoke", "train_model", "verify_merged"}
    training = there.jobs["train_model"]
    assert (training["TimeLimit"], training["MinMemoryNode"], training["NumCPUs"]) == ("00:30:00", "6000M", "2")


def test_a_second_call_finds_nothing_to_do(there: Demo, slurm: SlurmCluster) -> None:
    done = subprocess.run(call(there.folder, "--", f"merged/{RUN}"), capture_output=True, text=True, check=True)
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"train_model": {"slurm_partition": "gpus"}}, "there is no partition gpus: did you mean gpu?"),
        (
            {"merge_weights": {"mem_mb": 90_000}},
            "partition cpu: 90,000 MB of memory on one node; its largest node has 16,000",
        ),
    ],
)
def test_a_plan_that_slurm_could_never_start_is_refused(
    slurm: SlurmCluster, fresh_demo: Path, asked: dict[str, dict[str, Any]], words: str
) -> None:
    done = subprocess.run(
        call(fresh_demo, "-n", "--", f"merged/{RUN}", **asked), capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    (rule,) = asked
    assert f"\n  {rule}, run {RUN}" in said
    assert words in said
    assert "Traceback" not in said
    assert "what to do: " in said
