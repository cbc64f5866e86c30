"""The comparison of a merged folder's files and layout with the base's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tiny_models import file_names, write_base
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.proof import verify_files


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def merged(base: Path) -> Path:
    """As far as files and layout go, a merged folder is a copy."""
    return shutil.copytree(base, base.parent / "merged")


def test_a_folder_like_the_base_passes(base: Path, merged: Path) -> None:
    shards = verify_files(base, merged, file_names(base))
    assert shards == sorted(path.name for path in base.glob("*.safetensors"))


def test_files_about_the_model_may_differ(base: Path, merged: Path) -> None:
    (base / "README.md").write_text("the base")
    (merged / "README.md").write_text("the merged model")
    (merged / "provenance.json").write_text("{}")
    verify_files(base, merged, file_names(base))


def test_weights_in_other_forms_may_stay_out(base: Path, merged: Path) -> None:
    (base / "pytorch_model.bin").write_bytes(b"unmerged")
    verify_files(base, merged, file_names(base))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"])
def test_missing_or_changed_file(base: Path, merged: Path, name: str) -> None:
    """A processor's or tokenizer's file that did not come along."""
    path = merged / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(VlmflowError, match=f"{path}: differs from the base's file"):
        verify_files(base, merged, file_names(base))
    path.unlink()
    with pytest.raises(VlmflowError, match=f"{path}: is missing"):
        verify_files(base, merged, file_names(base))


def test_a_header_that_claims_more_than_there_can_be(base: Path, merged: Path) -> None:
    path = min(merged.glob("*.safetensors"))
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(VlmflowError, match=f"{path}: its header"):
        verify_files(base, merged, file_names(base))


def test_missing_shard(base: Path, merged: Path) -> None:
    path = min(merged.glob("*.safetensors"))
    path.unlink()
    with pytest.raises(VlmflowError, match=f"{path}: is missing"):
        verify_files(base, merged, file_names(base))


def test_file_that_does_not_belong_there(base: Path, merged: Path) -> None:
    (merged / "adapter_config.json").write_text("{}")
    with pytest.raises(VlmflowError, match=r"adapter_config\.json: the base has no such file"):
        verify_files(base, merged, file_names(base))


@pytest.mark.parametrize(
    ("files", "config", "missing"),
    [
        (["tokenizer.json", "tokenizer_config.json"], {}, r"tokenizer_config\.json"),
        (["tokenizer.json"], {"vision_config": {}}, r"preprocessor_config\.json or processor_config\.json"),
    ],
)
def test_base_that_cannot_be_used_offline(base: Path, files: list[str], config: dict[str, Any], missing: str) -> None:
    """A base that lacks what every user of it needs."""
    for name in files:
        (base / name).unlink()
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    merged = shutil.copytree(base, base.parent / "merged")
    with pytest.raises(VlmflowError, match=f"has no {missing}"):
        verify_files(base, merged, file_names(base))


def test_truncated_shard(base: Path, merged: Path) -> None:
    """A merged shard that a full disk cut short."""
    path = min(merged.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VlmflowError, match=rf"{path.name}: truncated: [\d,]+ bytes, the base has [\d,]+"):
        verify_files(base, merged, file_names(base))


def test_renamed_key(base: Path, merged: Path) -> None:
    """A tensor under another name of the same length."""
    path = next(path for path in merged.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"modex.norm.weight"))
    with pytest.raises(VlmflowError, match=r"tensor model\.norm\.weight is missing, in the base \{"):
        verify_files(base, merged, file_names(base))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda header: header.replace(b'"F32"', b'"I32"', 1), "is {'dtype': 'I32'"),
        (
            lambda header: header.replace(b'"format":"pt"', b'"format":"tf"'),
            "tensor __metadata__ is {'format': 'tf'}",
        ),
        (lambda header: header.replace(b'{"__metadata__"', b' "__metadata__"'), "its header cannot be read"),
    ],
)
def test_changed_header(base: Path, merged: Path, change: Callable[[bytes], bytes], fault: str) -> None:
    """Shapes, types and order are the base's."""
    path = min(merged.glob("*.safetensors"))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(VlmflowError, match=fault):
        verify_files(base, merged, file_names(base))


def test_tensors_in_another_order(base: Path, merged: Path) -> None:
    """The same tensors, packed otherwise."""
    path = next(path for path in sorted(merged.glob("*.safetensors")) if len(load_file(path)) > 1)
    size = path.stat().st_size
    save_file({name: tensor + 0 for name, tensor in load_file(path).items()}, path, {"format": "np"})
    assert path.stat().st_size == size
    with pytest.raises(VlmflowError, match=f"{path.name}: tensor"):
        verify_files(base, merged, file_names(base))
