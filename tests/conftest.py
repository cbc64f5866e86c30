"""The finished road, walked once for all tests that look at it."""

import os
from pathlib import Path

import pytest

from roads import RUN, make_demo_folder, snakemake

# Two trainers and the tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def road(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder in which the demo ran from the sample to merged weights; nobody writes into it."""
    folder = make_demo_folder(tmp_path_factory.mktemp("road"))
    (folder / "said.txt").write_text(snakemake(folder, f"merged/{RUN}"))
    return folder
