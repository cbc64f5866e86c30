"""The published processor file: the only file that differs from the proven ones."""

import json
from pathlib import Path

from vlmflow.core.files import sha256_of
from vlmflow.merging.proof import LimitedFile, publish_limits, take_over
from vlmflow.pictures.budget import ScaleLimits

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
