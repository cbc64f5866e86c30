"""The names of a model's tensors."""

import json
from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import INDEX, SINGLE
from vlmflow.fetch.model_weights import refuse_other_tensors, tensor_names
from vlmflow.fetch.placed import naming_files


def weights(*names: str) -> bytes:
    """Give a safetensors file with tensors of one byte."""
    entries = {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(len(names))


def sharded(folder: Path) -> list[str]:
    """Write two shards and their index; returns their names."""
    shards = {"one.safetensors": ["b"], "two.safetensors": ["a", "c"]}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for shard, names in shards.items():
        (folder / shard).write_bytes(weights(*names))
    return [INDEX, *shards]


def test_they_come_from_the_index_or_from_the_only_file(tmp_path: Path) -> None:
    assert tensor_names(tmp_path, ["config.json", SINGLE]) is None, "it is not here"
    (tmp_path / SINGLE).write_bytes(weights("b", "a"))
    assert tensor_names(tmp_path, [SINGLE]) == ["a", "b"]
    assert tensor_names(tmp_path, sharded(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content", [b"", b"weights", (1 << 60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_a_header_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(VlmflowError, match=r"model\.safetensors: its header cannot be read: "):
        tensor_names(tmp_path, [SINGLE])


def test_an_index_that_names_other_tensors_than_the_files_have_is_refused(tmp_path: Path) -> None:
    """Lengths and tensors were checked by the index alone."""
    names = sharded(tmp_path)
    refuse_other_tensors(tmp_path, names)
    (tmp_path / "two.safetensors").write_bytes(weights("a"))
    with pytest.raises(VlmflowError, match=r"index\.json: tensor c is listed for two"):
        refuse_other_tensors(tmp_path, names)
    (tmp_path / "two.safetensors").write_bytes(weights("a", "c", "d\x1b"))
    with pytest.raises(VlmflowError, match=r"tensor d\\x1b is not listed, but is in two"):
        refuse_other_tensors(tmp_path, names)


def test_the_only_file_of_weights_belongs_to_what_is_watched() -> None:
    """Its tensors are compared before it is fetched, so others must be compared again."""
    assert naming_files(["config.json", SINGLE]) == ["config.json", SINGLE]
    assert naming_files(["config.json", INDEX, "one.safetensors"]) == ["config.json", INDEX]
