"""`vlmflow verify` on a finished run: the whole chain from the raw file to the tensors."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from vlmflow.core.files import sha256_of
from workflow_runs import RUN, copy_folder, vlmflow


def verify(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vlmflow("verify", *words), capture_output=True, text=True, check=False)


@pytest.fixture
def folder(demo_run: Path, tmp_path: Path) -> Path:
    """Return a working directory with the finished run; its merged weights may be changed."""
    made = tmp_path / "demo"
    made.mkdir()
    for place in demo_run.iterdir():
        if place.name != "merged":
            (made / place.name).symlink_to(place)
    copy_folder(demo_run / "merged", made / "merged")
    return made


def test_the_whole_chain_holds_and_a_changed_number_breaks_it(folder: Path) -> None:
    whole = verify(RUN, "--directory", folder)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    lines = whole.stdout.splitlines()
    assert [line[:8].strip() for line in lines] == ["ok"] * 9
    assert re.fullmatch(r"ok +pictures of these rows: (\d+) of \1 files", lines[3])
    assert "but for the picture limits in preprocessor_config.json" in lines[7]
    assert "tensors carry the training" in lines[8]

    shard = sorted((folder / "merged" / RUN).glob("*.safetensors"))[0]
    recorded = sha256_of(shard)
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    changed = verify("--copy", folder / "merged" / RUN, "--json")
    assert changed.returncode == 1
    told = json.loads(changed.stdout)
    assert not told["good"]
    differs = {"file": str(shard), "expected": recorded, "actual": sha256_of(shard)}
    assert differs in [difference for link in told["links"] for difference in link["differences"]]

    provenance = folder / "merged" / RUN / "provenance.json"
    provenance.write_text(provenance.read_text().replace(recorded, sha256_of(shard)))
    forged = verify("--copy", folder / "merged" / RUN)
    assert forged.returncode == 1, "who also changes the recorded digest is found by the tensors"
    assert forged.stdout.splitlines()[-2].startswith("DIFFERS   tensors: base + training = weights")
