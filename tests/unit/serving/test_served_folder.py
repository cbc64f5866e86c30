"""The folder that a server loads, and the picture limits in it."""

import json
from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.serving.finished_run import link_served

PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "a": 1}


def model(folder: Path, **files: object) -> Path:
    folder.mkdir()
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / ".snakemake_timestamp").touch()
    return folder


def read(file: Path) -> object:
    return json.loads(file.read_text())


def test_only_the_size_of_pictures_differs_and_all_else_is_linked(tmp_path: Path) -> None:
    base = model(tmp_path / "base", preprocessor_config=PROCESSOR)
    link_served(base, tmp_path / "served", 1024)
    expected = PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 1_048_576}}
    assert read(tmp_path / "served" / "preprocessor_config.json") == expected
    assert read(base / "preprocessor_config.json") == PROCESSOR, "the model's own file stays"
    links = {file.name: file.resolve() for file in (tmp_path / "served").iterdir() if file.is_symlink()}
    assert links == {name: base / name for name in ("config.json", "model.safetensors")}


def test_the_file_that_transformers_reads_is_changed(tmp_path: Path) -> None:
    nested = {"image_processor": PROCESSOR, "processor_class": "P"}
    base = model(tmp_path / "base", preprocessor_config=PROCESSOR, processor_config=nested)
    link_served(base, tmp_path / "served", 1024)
    served = tmp_path / "served"
    assert read(served / "processor_config.json") == nested | {
        "image_processor": PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 1_048_576}}
    }
    assert (served / "preprocessor_config.json").is_symlink()


def test_a_text_model_has_no_limits_and_an_adapter_lies_beside_its_base(tmp_path: Path) -> None:
    base, adapter = model(tmp_path / "base"), tmp_path / "full"
    adapter.mkdir()
    with pytest.raises(VlmflowError, match=r"full/adapter_config\.json: is missing"):
        link_served(base, tmp_path / "served", 1024, adapter)
    for name in ("adapter_config.json", "adapter_model.safetensors", "report.json"):
        (adapter / name).write_text("{}")
    link_served(base, tmp_path / "served", 1024, adapter)
    names = {file.name for file in (tmp_path / "served").iterdir()}
    assert names == {"config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"}


def test_what_is_no_model_and_a_processor_without_limits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(VlmflowError, match=r"has no config\.json"):
        link_served(tmp_path / "empty", tmp_path / "served", 1024)
    base = model(tmp_path / "base", preprocessor_config={"patch_size": 16, "merge_size": 2})
    with pytest.raises(VlmflowError, match=r"preprocessor_config\.json: has no size, or min_pixels and max_pixels"):
        link_served(base, tmp_path / "served", 1024)
