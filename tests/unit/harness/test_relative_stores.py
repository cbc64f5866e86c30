from types import SimpleNamespace

import pytest
import yaml
from snakemake_interface_executor_plugins.settings import SharedFSUsage

from vlmflow.config.model import check_config
from vlmflow.harness.plan import refuse_relative_stores, relative_places
from workflow_runs import ROOT

DEFAULTS = yaml.safe_load((ROOT / "config.yaml").read_text())
ON_CLUSTER = yaml.safe_load((ROOT / "profiles/kubernetes/stores.yaml").read_text())


def call(shares: bool, main: bool = True) -> SimpleNamespace:
    """Return what the check reads of a workflow. shares: whether jobs see its working directory."""
    usage = SharedFSUsage.all() if shares else frozenset()
    return SimpleNamespace(is_main_process=main, storage_settings=SimpleNamespace(shared_fs_usage=usage))


def merged(*layers: dict) -> dict:
    result: dict = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def test_the_clusters_stores_are_absolute() -> None:
    assert relative_places(check_config(merged(DEFAULTS, ON_CLUSTER), [])) == []


def test_the_weights_of_another_run_are_a_target() -> None:
    layer = {"models": {"qwen3-8b": {"source": "merged/qwen3vl-fire"}}}
    assert relative_places(check_config(merged(DEFAULTS, ON_CLUSTER, layer), [])) == []


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        ({"stores": {"runs": "runs"}}, "stores.runs"),
        ({"datasets": {"fire": {"image_roots": ["/cache/a", "b"]}}}, "datasets.fire.image_roots.1"),
        ({"datasets": {"fire": {"test": "sample/test.json"}}}, "datasets.fire.test"),
        ({"datasets": {"fire": {"train": ["/cache/a.json", "b.json"]}}}, "datasets.fire.train"),
        ({"models": {"qwen3-8b": {"source": "tiny-model"}}}, "models.qwen3-8b.source"),
    ],
)
def test_a_relative_path_is_refused_by_its_key(layer: dict, key: str) -> None:
    settings = check_config(merged(DEFAULTS, ON_CLUSTER, layer), [])
    with pytest.raises(SystemExit, match=rf"(?s)^{key}: .* is relative.*what to do: .*stores\.yaml"):
        refuse_relative_stores(call(shares=False), settings)


@pytest.mark.parametrize(("shares", "main"), [(True, True), (False, False)])
def test_nothing_is_refused_where_jobs_see_this_folder_or_in_a_pod(shares: bool, main: bool) -> None:
    refuse_relative_stores(call(shares, main), check_config(DEFAULTS, []))
