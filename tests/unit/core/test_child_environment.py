"""The variables that a stage's programs get: those of an allow-list, and those that the configuration names."""

import os

import pytest

from vlmflow.core.child_programs import NAMED, child_environment

OURS = {"PYTHONSAFEPATH": "1"}

KEPT = {
    *("PATH", "HOME", "TMPDIR", "LC_ALL", "PYTHONUTF8", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "CXX"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "VLMFLOW_RECORDS"),
}

CHANGES_WHAT_IS_TRAINED = {
    *(
        "SPATIAL_MERGE_SIZE",
        "MAX_RATIO",
        "MAX_PIXELS",
        "CELOSS_PARALLEL_SIZE",
        "RAY_SWIFT_ARGS",
        "NVIDIA_TF32_OVERRIDE",
    ),
    *(
        "RANK",
        "MASTER_ADDR",
        "WORLD_SIZE",
        "PET_NNODES",
        "SLURM_PROCID",
        "MKL_CBWR",
        "PYTHONWARNINGS",
        "PYTHONHASHSEED",
    ),
}

KEYS = {"HF_TOKEN", "WANDB_API_KEY", "VLMFLOW_ANSWER_KEY", "AWS_SECRET_ACCESS_KEY"}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A shell with all these variables, and no others."""
    for name in os.environ:
        monkeypatch.delenv(name)
    for name in KEPT | CHANGES_WHAT_IS_TRAINED | KEYS:
        monkeypatch.setenv(name, name.lower())
    return monkeypatch


def names(*also: str) -> set[str]:
    given = child_environment(*also)
    assert given.items() >= OURS.items()
    return given.keys() - OURS.keys()


def test_what_changes_a_training_does_not_pass_and_no_key_does(shell: pytest.MonkeyPatch) -> None:
    assert names() == KEPT
    assert child_environment()["CXX"] == "cxx"


def test_the_configuration_lets_others_pass_by_name_or_beginning(shell: pytest.MonkeyPatch) -> None:
    shell.setenv(NAMED, "SLURM_* MKL_CBWR AWAY")
    assert names() == KEPT | {"SLURM_PROCID", "MKL_CBWR", NAMED}
    assert names("PET_*") == KEPT | {"SLURM_PROCID", "MKL_CBWR", NAMED, "PET_NNODES"}


def test_a_key_passes_only_by_its_own_name(shell: pytest.MonkeyPatch) -> None:
    assert names("HF_*", "WANDB_*", "AWS_*") == KEPT
    assert names("HF_TOKEN") == KEPT | {"HF_TOKEN"}
