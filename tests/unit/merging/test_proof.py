"""What a proven folder says of its files, and when they are no more those."""

from pathlib import Path

import pytest

from made_accounts import some_checks
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.merging.proof import PROOF, read_proof, verified_files, write_proof


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
