"""Slurm for the tests of this folder."""

from collections.abc import Iterator

import pytest

from debian import lacking
from slurm.slurm_cluster import SlurmCluster, why_not


@pytest.fixture(scope="package")
def own_slurm() -> Iterator[SlurmCluster]:
    """Return Slurm for tests that start and stop it themselves; it may be down."""
    if reason := why_not():
        lacking(reason)
    slurm = SlurmCluster()
    yield slurm
    slurm.down()


@pytest.fixture
def slurm(own_slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Return Slurm with two idle nodes; what the test starts reaches it. Its jobs end with the test."""
    own_slurm.up()
    for name, value in own_slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield own_slurm
    own_slurm.clear()
