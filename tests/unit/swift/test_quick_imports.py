import gc
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vlmflow.swift.child_process import OF_BITSANDBYTES, quick_imports
from workflow_runs import ROOT

READ = importlib.metadata.packages_distributions


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_meanwhile_the_collector_pauses_and_metadata_is_read_once() -> None:
    with quick_imports():
        assert not gc.isenabled()
        assert importlib.metadata.packages_distributions() is importlib.metadata.packages_distributions()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert importlib.metadata.packages_distributions is READ


def test_a_failed_import_leaves_nothing_changed() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is READ


def test_advice_to_install_a_package_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    """A CPU with AVX512-BF16 makes bitsandbytes give it at its import; its other warnings are shown."""
    with quick_imports():
        pass
    logger = logging.getLogger(OF_BITSANDBYTES)
    logger.warning("Failed to load a kernel: %s. Please make sure you already `pip install kernels`", "no module")
    logger.warning("a weight is not finite")
    assert caplog.messages == ["a weight is not finite"]


def test_stages_that_verify_start_in_silence() -> None:
    """As far as this machine's CPU makes a library speak."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from stages import verify_tensors, verify_merged"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts")], capture_output=True, text=True, check=True
    )
    assert "kernels" not in done.stdout + done.stderr
