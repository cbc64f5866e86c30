"""The disk is full while a stage writes: the file is named, nothing incomplete has its final name, a retry succeeds."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drawn_pictures import drawn, encoded, put
from made_rows import form_rows, write_array
from vlmflow.config.data_settings import RowChoice
from vlmflow.core.account import write_account
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from workflow_runs import program, validation

NEXT_STEP = "free disk space there, then run the same command again"
ROWS = [{"text": f"{number} " + "word " * 60} for number in range(10_000)]
"""3 MB, and the same size when converted."""


def on_a_full_disk(disk: Path, size: str, script: str, keeps: str = "nothing", **values: Any) -> str:
    """Run a stage with a small disk on the folder `disk`, then with a large one; give what it said.

    keeps: a name pattern of what remains of the first run.
    """
    disk.mkdir(exist_ok=True)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    stage = shlex.join([sys.executable, str(program(script)), *options])
    words = f"""
        mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))}
        {stage} && exit 9
        cd {shlex.quote(str(disk))}
        find . -type f -not -name '*.part' -not -path {shlex.quote(keeps)}
        mount -o remount,size=64m {shlex.quote(str(disk))}
        {stage} || exit 8
    """
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    return done.stderr


def prepared(folder: Path) -> dict[str, Any]:
    """Convert ROWS; give the files."""
    raw = write_array(folder / "train.json", ROWS)
    files = {"raw": raw, "converted": folder / "train.jsonl", "rejects": folder / "train.rejects.jsonl"}
    files["unread"] = folder / "train.unread.json"
    make = form_rows("text", "text", {}, "Go on.", None)
    with open_rows([raw], "train") as rows:
        found = convert(rows, files["converted"], files["rejects"], "train", make, RowChoice(), 1)
    write_account(files["unread"], found)
    return files


def test_while_rows_are_converted(tmp_path: Path) -> None:
    raw = write_array(tmp_path / "train.json", ROWS)
    disk = tmp_path / "disk"
    files = {"raw": raw, "converted": disk / "c.jsonl", "rejects": disk / "r.jsonl", "unread": disk / "u.json"}
    settings = "{kind: text, modality: text, prompt: Go on.}"
    said = on_a_full_disk(disk, "1m", "convert_rows", **files, settings=settings, split="train", threads=2)
    assert f"No space left on device: '{disk}/c.jsonl.part'\n  what to do: {NEXT_STEP}" in said


@pytest.mark.parametrize(("size", "named"), [("1m", ""), ("6m", "/train.jsonl.part")])
def test_while_rows_are_validated(tmp_path: Path, size: str, named: str) -> None:
    """First the verdicts, in an unnamed file, do not fit; then the rows do not."""
    files = prepared(tmp_path)
    disk = tmp_path / "disk"
    given = {("raw_train" if name == "raw" else name): file for name, file in files.items()}
    made = {"stats": disk / "stats.json", "counts": disk / "counts.html"}
    settings = json.dumps(validation(max_reject_share=0, kind="text", one_prompt=True, modality="text"))
    said = on_a_full_disk(disk, size, "validate_sharegpt", **given, **made, settings=settings, threads=2)
    assert f"No space left on device: '{disk}{named}'\n  what to do: {NEXT_STEP}" in said


@pytest.mark.parametrize(("full", "size"), [("manifests", "100k"), ("pictures", "60k")])
def test_while_pictures_are_resolved(tmp_path: Path, full: str, size: str) -> None:
    names = [f"a/{number}.png" for number in range(12)]
    for number, name in enumerate(names):
        put(tmp_path / "root" / name, encoded(drawn(300 + number, 300).convert("RGBA"), "PNG", compress_level=1))
    names += [f"a/gone-{number}.png" for number in range(2_000)]
    raw = write_array(tmp_path / "train.json", [{"image": name} for name in names])
    files = {"raw": raw, "manifest": tmp_path / "manifests" / "train.jsonl", "store": tmp_path / "pictures"}
    settings = {"dataset": "d", "roots": json.dumps([str(tmp_path / "root")]), "limits": "{}", "threads": 2}
    whole = "./.rewritten/*.png"
    said = on_a_full_disk(tmp_path / full, size, "resolve_images", whole, **files, **settings)
    if full == "manifests":
        assert f"No space left on device: '{tmp_path}/manifests/train.jsonl.part'\n  what to do: {NEXT_STEP}" in said
    else:
        assert f"{tmp_path}/pictures/" in said
        assert "No space left on device" in said
        assert "put the store on a larger disk (config: stores.pictures)" in said
