import gc
import importlib.metadata
from collections.abc import Iterator

import pytest

from vlmflow.swift.quick_imports import quick_imports

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
