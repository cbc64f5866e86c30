"""The proof of a merged folder: its files and layout, different logits, and what a proof is worth later."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from made_accounts import some_checks
from tiny_models import file_names, write_base
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json, sha256_of
from vlmflow.merging.proof import (
    PROOF,
    LimitedFile,
    LogitProof,
    publish_limits,
    read_proof,
    take_over,
    verified_files,
    verify_files,
    write_proof,
)
from vlmflow.merging.verify_logits import AGREE, INCONCLUSIVE, Logits, compare, judge
from vlmflow.pictures.budget import ScaleLimits


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


ALLOWED = 0.05


def proof_of(found_share: float, rounded_share: float, stray: float = 0.0, shift: float = 0.0) -> LogitProof:
    """Return the figures of a merge that shows one share of the adapter's effect, while rounding leaves another."""
    draw = torch.Generator().manual_seed(1)
    plain = torch.randn(20, 50, generator=draw)
    plain[:, 0] += 10
    effect = 0.02 * torch.randn(20, 50, generator=draw)
    found = plain + found_share * effect + stray * torch.randn(20, 50, generator=draw) + shift
    return compare(Logits(plain, plain + effect, plain + rounded_share * effect, found), ALLOWED, 1, "bfloat16", "cpu")


def verdict(found_share: float, rounded_share: float, stray: float = 0.0, exact: bool = True) -> str:
    proof = proof_of(found_share, rounded_share, stray)
    assert proof.effect_rounded == pytest.approx(rounded_share, abs=1e-3)
    return judge(proof, Path("merged"), exact)


def test_the_same_logits_agree() -> None:
    assert verdict(1.0, 1.0) == AGREE


def test_an_effect_that_rounding_hides_is_inconclusive() -> None:
    """A valid merge of a short run shows what rounding leaves, as peft's own does."""
    assert verdict(0.6, 0.6) == INCONCLUSIVE
    assert verdict(1.0, 0.6, exact=False) == INCONCLUSIVE


@pytest.mark.parametrize(("found", "rounded"), [(0.0, 1.0), (0.6, 1.0), (2.0, 1.0), (0.0, 0.6), (1.0, 0.6)])
def test_an_effect_that_rounding_does_not_explain_is_refused(found: float, rounded: float) -> None:
    with pytest.raises(VlmflowError, match=rf"merged: .* show {found:.2f} times the adapter's effect"):
        verdict(found, rounded)


def test_a_shift_of_all_logits_of_a_position_is_no_difference() -> None:
    assert judge(proof_of(1.0, 1.0, shift=30.0), Path("merged"), exact=True) == AGREE


def test_other_tokens_at_clear_positions_are_refused() -> None:
    proof = proof_of(1.0, 1.0)
    assert (proof.clear_positions, proof.clear_disagreements) == (20, 0)
    with pytest.raises(VlmflowError, match="choose another token at 1 of 20 clear positions"):
        judge(msgspec.structs.replace(proof, clear_disagreements=1), Path("merged"), exact=True)


@pytest.mark.parametrize("stray", [1.0, float("nan")])
def test_logits_that_stray_are_refused(stray: float) -> None:
    with pytest.raises(VlmflowError, match=r"merged: .* differ by \S+ of their spread; rounding explains only 0\.05"):
        verdict(1.0, 1.0, stray)


def test_logits_without_spread_are_refused() -> None:
    same = torch.zeros(20, 50)
    proof = compare(Logits(same, same, same, same), ALLOWED, 1, "bfloat16", "cpu")
    with pytest.raises(VlmflowError, match="differ by nan of their spread"):
        judge(proof, Path("merged"), exact=True)


@pytest.mark.parametrize("shape", [(20, 1), (19, 50)])
def test_logits_of_other_shapes_are_refused(shape: tuple[int, int]) -> None:
    same = torch.ones(20, 50)
    with pytest.raises(VlmflowError, match=r"the logits have the shapes \(20, 50\), \(20, 50\), \("):
        compare(Logits(same, same, same, torch.ones(shape)), ALLOWED, 1, "bfloat16", "cpu")


@pytest.fixture
def proven(tmp_path: Path) -> Path:
    """The weights of a base that was proven itself, and brings the proof of then."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / PROOF).write_text('{"of": "the base"}')
    write_proof(tmp_path, some_checks(), verified_files(tmp_path, tmp_path.name), code=tmp_path)
    return tmp_path


def test_a_proof_in_the_base_is_replaced_by_ours(proven: Path) -> None:
    """It was counted among the proven files, and no longer had its digest: such a run could never be published."""
    assert read_proof(proven).files.keys() == {"model.safetensors"}
    assert "of" not in read_json(proven / PROOF)


@pytest.mark.parametrize("name", ["model.safetensors", "new.json"])
def test_a_file_that_was_not_proven_is_refused(proven: Path, name: str) -> None:
    (proven / name).write_bytes(b"WEIGHTS")
    with pytest.raises(VlmflowError, match=name):
        read_proof(proven)


PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}


def test_only_the_published_file_changes(tmp_path: Path) -> None:
    proven, merged = tmp_path / "verified", tmp_path / "merged"
    proven.mkdir()
    (proven / "config.json").write_text("{}")
    (proven / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    before = {file.name: file.read_bytes() for file in proven.iterdir()}
    digest = sha256_of(proven / "preprocessor_config.json")
    take_over(proven, merged)
    limits = ScaleLimits(4096, 65_536)
    published = merged / "preprocessor_config.json"
    limited = publish_limits(merged, 64)
    assert limited == LimitedFile(published.name, digest, sha256_of(published), limits)
    assert {file.name: file.read_bytes() for file in proven.iterdir()} == before
    assert json.loads(published.read_text()) == PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 65_536}}
    assert (merged / "config.json").samefile(proven / "config.json")


def test_a_model_without_pictures_stays_as_it_is(tmp_path: Path) -> None:
    assert publish_limits(tmp_path, 64) is None
