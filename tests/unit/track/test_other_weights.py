"""Only what was evaluated and asked of a run's own weights is told about it."""

import json
from pathlib import Path

import pytest

from made_accounts import some_checks, some_provenance
from tracked_run import RUN, tracked_run
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.proof import LimitedFile, Proof, ProvenFile, proven_digest
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.reports.provenance import BaseModelFiles, proven_weights, published_weights
from vlmflow.track.story import story_of

FILES = {name: ProvenFile(1, name) for name in ("a.safetensors", "README.md", "preprocessor_config.json")}


def of_older_weights(report: Path) -> None:
    account = json.loads(report.read_text())
    account["tuned"]["digest"] = "older"
    report.write_text(json.dumps(account))


@pytest.mark.parametrize("stage", ["eval", "answers"])
def test_a_story_of_other_weights_is_refused(tmp_path: Path, stage: str) -> None:
    folder = tracked_run(tmp_path)
    of_older_weights(folder / stage / RUN / "val" / "report.json")
    places = ([folder / name / RUN / "val"] for name in ("eval", "answers"))
    with pytest.raises(VlmflowError, match=f"{stage}/{RUN}/val: it is of other weights than those in"):
        story_of(folder / "checkpoints" / RUN / "full", folder / "merged" / RUN, *places)


def test_the_provenance_tells_the_proven_weights_as_the_proof_does(tmp_path: Path) -> None:
    """With a file of the base that the card replaces, and one that got picture limits when it was published."""
    verified, merged = tmp_path / "verified" / "mine", tmp_path / "merged" / "mine"
    assert proven_weights(verified, merged) is None
    proof = Proof(some_checks(), FILES, None, {})
    limited = LimitedFile("preprocessor_config.json", "preprocessor_config.json", "limited", ScaleLimits(1, 2))
    facts = some_provenance(
        merged={"a.safetensors": "a.safetensors", "preprocessor_config.json": "limited"},
        picture_limits=limited,
        base_model=BaseModelFiles("hf://a/b", "abc", "digest", {"a.safetensors": "x", "README.md": "README.md"}, []),
    )
    write_account(merged / "provenance.json", facts)
    assert published_weights(merged) == proven_weights(verified, merged) == proven_digest(proof)
    write_account(verified / "proof.json", Proof(some_checks(), {}, None, {}))
    assert proven_weights(verified, merged) != proven_digest(proof)
