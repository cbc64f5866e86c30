"""Slurm for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from slurm.slurm_cluster import SlurmCluster, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the test that ends Slurm last."""
    items.sort(key=lambda item: item.path.name == "test_slurm_left_clean.py")


@pytest.fixture(scope="session")
def session_slurm() -> Iterator[SlurmCluster]:
    """Return Slurm with two idle nodes, started once for all tests."""
    if reason := why_not():
        # In CI, an untested Slurm is a failure.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with SlurmCluster() as slurm:
        yield slurm


@pytest.fixture
def slurm(session_slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Return Slurm with two idle nodes; commands of Slurm that the test starts reach it. Jobs end with the test."""
    for name, value in session_slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield session_slurm
    session_slurm.clear()
