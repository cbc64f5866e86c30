"""Where jobs find what they need: stores, folders for temporary files, and the image of a pod."""

import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from snakemake_interface_executor_plugins.settings import SharedFSUsage

from vlmflow.config.model import check_config
from vlmflow.core.errors import VlmflowError
from vlmflow.harness.plan import refuse_relative_stores, relative_places
from vlmflow.harness.stage import LONGEST, refuse_long_temporary_folder
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


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The longest folder that is allowed, and one whose path has a byte more; each has a longer letter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        made = [Path(short, "x" * (length - len(short) - 3) + "é") for length in (LONGEST, LONGEST + 1)]
        for folder in made:
            (folder / "torch-shm-dir-XXXXXX").mkdir(parents=True)
        yield made


def test_the_longest_is_that_in_which_a_socket_still_fits(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, error in zip(folders, (None, VlmflowError), strict=True):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        place = str(folder / "torch-shm-dir-XXXXXX" / "manager.sock")
        with socket.socket(socket.AF_UNIX) as end:
            if error is None:
                refuse_long_temporary_folder()
                end.bind(place)
            else:
                with pytest.raises(error, match="73 bytes"):
                    refuse_long_temporary_folder()
                with pytest.raises(OSError, match="path too long"):
                    end.bind(place)


TRAINING_ALONE = (
    "datasets",
    "matplotlib",
    "nltk",
    "openai",
    "peft",
    "rapidfuzz",
    "safetensors",
    "scipy",
    "swift",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages of envs/train.lock, imported by their names, that envs/data.lock does not have."""

WITHOUT = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ImportError(f"{name} is not in the data image")

sys.meta_path.insert(0, Missing())
for script in sys.argv[2:]:
    importlib.import_module(script)
"""


def test_scripts_of_the_data_image_import_no_package_of_training() -> None:
    scripts = set()
    for file in (ROOT / "rules").glob("*.smk"):
        for rule in re.split(r"\n(?:use )?rule ", file.read_text())[1:]:
            if "pod_template=" not in rule and (script := re.search(r'"\.\./scripts/stages/(\w+)\.py"', rule)):
                scripts.add(f"stages.{script[1]}")
    assert {"stages.convert_rows", "stages.data_page", "stages.publish_merged", "stages.run_page"} <= scripts
    import_without_training(scripts)


@pytest.mark.lengthy
def test_commands_of_the_data_environment_import_no_package_of_training() -> None:
    """A laptop that uses a cluster has no other environment."""
    tools = {f"vlmflow.tools.{name}" for name in ("check_config", "status", "track_run")}
    remote = ("kubernetes.doctor", "slurm.doctor", "cluster.controller", "cluster.kubectl", "storage.s3_get")
    import_without_training({"vlmflow.command", *tools, *(f"vlmflow.remote.{name}" for name in remote)})


def import_without_training(scripts: Iterable[str]) -> None:
    words = [sys.executable, "-c", WITHOUT, " ".join(TRAINING_ALONE), *sorted(scripts)]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT / "scripts")}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
