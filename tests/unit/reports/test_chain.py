"""The chain of digests: what differs is found wherever it is, and a hostile provenance leads nowhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from made_accounts import LENGTHS
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import InFp8, ModelManifest, digest_of_files
from vlmflow.lengths.summary import FittedRows, FittedSplit
from vlmflow.pictures.manifest import KnownPicture, pictures_digest
from vlmflow.serving.finished_run import published
from vlmflow.tools.check_provenance import main
from workflow_runs import ROOT

PROCESSOR = b'{"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}'
LIMITED = PROCESSOR.replace(
    b'"shortest_edge": 65536, "longest_edge": 16777216', b'"shortest_edge": 4096, "longest_edge": 65536'
)
NAME = "preprocessor_config.json"


def of(content: bytes) -> str:
    return sha256(content).hexdigest()


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Return a published folder alone, as one that was downloaded."""
    folder = tmp_path / "copy"
    folder.mkdir()
    files = {"config.json": b"{}", "model.safetensors": b"weights", NAME: LIMITED}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("card")
    (folder / ".gitattributes").write_text("of the hub")
    digests = {name: of(content) for name, content in files.items()}
    record = {
        "run": "mine",
        "data": {
            "dataset": "fire",
            "raw": {"train": [{"file": "raw/fire/a.json", "sha256": of(b"rows")}]},
            "digests": {},
        },
        "base_model": {"digest": "d", "files": digests | {"model.safetensors": of(b"base"), NAME: of(PROCESSOR)}},
        "training": {
            "tuner": "lora",
            "settings": {"image_max_tokens": 64},
            "digests": {"data": "rows", "model": "d", "released": {"adapter_model.safetensors": of(b"a")}},
        },
        "merged": digests,
        "picture_limits": {
            "file": NAME,
            "proven": of(PROCESSOR),
            "published": of(LIMITED),
            "limits": {"shortest_edge": 4096, "longest_edge": 65_536},
        },
    }
    (folder / "provenance.json").write_text(json.dumps(record))
    return folder


def verdicts(said: str) -> list[str]:
    return [line[:8].strip() for line in said.splitlines() if not line.startswith(" ")]


def change(merged: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((merged / "provenance.json").read_text())
    edit(record)
    (merged / "provenance.json").write_text(json.dumps(record))


def test_a_folder_alone_is_checked_and_all_else_is_not_here(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(merged, None)
    assert verdicts(capsys.readouterr().out) == ["not here", "ok", "ok", "not here"]


def test_digests_are_checked_without_torch(merged: Path) -> None:
    """On any machine with the packages of the data stages."""
    code = "import sys; sys.modules['torch'] = None; import pathlib; from vlmflow.tools import check_provenance; "
    code += f"sys.exit(0 if check_provenance.main(pathlib.Path({str(merged)!r}), None) else 1)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_differing_file_is_named_with_both_digests(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (merged / "model.safetensors").write_bytes(b"other")
    assert not main(merged, None)
    said = capsys.readouterr().out
    assert f"{merged}/model.safetensors: expected {of(b'weights')}, found {of(b'other')}" in said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: expected .*, found is missing"),
        (
            lambda folder: (folder / NAME).write_bytes(PROCESSOR),
            f"{NAME}: expected {of(LIMITED)}, found {of(PROCESSOR)}",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"),
            "adapter_model.safetensors: expected no such file",
        ),
        (lambda folder: (folder / "more").symlink_to("/etc"), "more: expected no such file"),
        (lambda folder: change(folder, lambda record: record.update(merged={})), "names no weights"),
        (
            lambda folder: change(folder, lambda record: record["base_model"]["files"].update({"config.json": "0"})),
            f"config.json: expected 0, found {of(b'{}')}",
        ),
        (
            lambda folder: change(folder, lambda record: record["base_model"]["files"].update({NAME: "0"})),
            f"{NAME}: expected 0, found {of(PROCESSOR)}",
        ),
        (
            lambda folder: change(folder, lambda record: record["training"]["settings"].update(image_max_tokens=16)),
            r"limits of up to 16 tokens, found .*longest_edge=65536",
        ),
        (
            lambda folder: change(folder, lambda record: record["base_model"].update(digest="e")),
            "the model of the training: expected e, found d",
        ),
    ],
    ids=[
        "missing weights",
        "wide limits",
        "one file more",
        "a link to a folder more",
        "no weights",
        "another file",
        "other limits",
        "limits of another training",
        "other model",
    ],
)
def test_whatever_differs_is_found(
    merged: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(merged)
    assert not main(merged, None)
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    assert "DIFFERS" in verdicts(printed)


def test_raw_files_of_the_working_directory_are_found(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """merged/RUN knows its working directory; one elsewhere is named."""
    work = merged.parent / "work"
    (work / "raw" / "fire").mkdir(parents=True)
    (work / "raw" / "fire" / "a.json").write_bytes(b"rows")
    (work / "merged").mkdir()
    os.symlink(merged, work / "merged" / "mine")
    assert main(work / "merged" / "mine", None)
    assert verdicts(capsys.readouterr().out)[0] == "ok"
    (work / "raw" / "fire" / "a.json").write_bytes(b"other rows")
    assert not main(merged, work)
    assert f"expected {of(b'rows')}, found {of(b'other rows')}" in capsys.readouterr().out


def test_files_of_edited_rows_are_compared_and_none_outside_of_the_folder_is_read(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = merged.parent / "work"
    work.mkdir()
    (work / "mended.jsonl").write_bytes(b"edited")
    outside = merged.parent / "secret"
    outside.write_bytes(b"secret")
    files = [{"file": name, "sha256": of(b"edited")} for name in ("mended.jsonl", str(outside), "../secret")]
    change(merged, lambda record: record["data"].update(mended=files))
    main(merged, work)
    said = capsys.readouterr().out
    assert "files of edited rows: 1 of 1 files; 2 outside of the working directory not read" in said
    assert of(b"secret") not in said
    (work / "mended.jsonl").write_bytes(b"edited again")
    assert not main(merged, work)
    assert of(b"edited again") in capsys.readouterr().out


def test_raw_files_are_found_whose_paths_a_pod_recorded(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There they are below the pod's own folder, and the digests are what counts."""
    path = "/outputs/.pods/a-pod/fs/outputs/targets/raw/fire/a.json"
    change(merged, lambda record: record["data"]["raw"]["train"][0].update(file=path))
    work = merged.parent / "work"
    (work / "raw" / "fire").mkdir(parents=True)
    (work / "raw" / "fire" / "a.json").write_bytes(b"rows")
    assert main(merged, work)
    assert verdicts(capsys.readouterr().out)[0] == "ok"


def test_raw_files_and_rows_of_a_mixtures_data_sets_are_compared(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("raw/a/rows.json", "raw/b/rows.json", "data/a/train.jsonl", "data/b/train.jsonl"):
        (merged.parent / name).parent.mkdir(parents=True)
        (merged.parent / name).write_bytes(name.encode())
    raw = [{"file": f"/volume/raw/{name}/rows.json", "sha256": of(f"raw/{name}/rows.json".encode())} for name in "ab"]
    mixed = {name: {"digests": {"train.jsonl": of(f"data/{name}/train.jsonl".encode())}} for name in "ab"}
    change(merged, lambda record: record["data"].update(dataset="blend", raw={"train": raw}, members=mixed))
    assert main(merged, merged.parent)
    said = capsys.readouterr().out
    assert "ok        raw files: 2 of 2 files" in said
    assert "ok        rows of a, mixed: 1 of 1 files" in said
    (merged.parent / "data" / "b" / "train.jsonl").write_bytes(b"another")
    assert not main(merged, merged.parent)
    assert "DIFFERS   rows of b, mixed" in capsys.readouterr().out


def test_rows_that_fit_are_those_of_the_training(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = merged.parent / "fitted" / "mine"
    fitted.mkdir(parents=True)
    files = {"train.jsonl": b'{"images": []}', "val.jsonl": b""}
    for name, content in files.items():
        (fitted / name).write_bytes(content)
    digests = {name: of(content) for name, content in files.items()} | {"pictures": "p"}
    split = FittedSplit(9, 0, 0, LENGTHS)
    write_account(fitted / "account.json", FittedRows("fire", "trajectory", 64, split, split, digests))
    assert not main(merged, merged.parent)
    assert f"account.json: expected rows, found {digests['train.jsonl']}" in capsys.readouterr().out
    change(merged, lambda record: record["training"]["digests"].update(data="".join(digests.values())))
    assert main(merged, merged.parent)
    assert verdicts(capsys.readouterr().out)[2] == "ok"
    (fitted / "val.jsonl").write_bytes(b"{}")
    assert not main(merged, merged.parent)
    assert f"val.jsonl: expected {of(b'')}, found {of(b'{}')}" in capsys.readouterr().out


def test_pictures_of_the_rows_are_compared(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = merged.parent
    fitted, store = directory / "fitted" / "mine", directory / "stores" / "pictures" / "fire"
    for folder in (fitted, store, directory / "images" / "fire"):
        folder.mkdir(parents=True)
    rows = {"train.jsonl": b'{"images": ["a.png"]}\n', "val.jsonl": b'{"images": ["b.png"]}\n'}
    for name, content in rows.items():
        (fitted / name).write_bytes(content)
    for name in ("a.png", "b.png"):
        (store / name).write_bytes(b"picture")
    manifest = directory / "images" / "fire" / "train.jsonl"
    entry = {"name": "a.png", "sha256": of(b"picture"), "rewritten": None}
    digests = {name: of(content) for name, content in rows.items()}
    of_val = entry | {"name": "b.png"}  # of a validation file, or of a mixture
    known = {"a.png": KnownPicture(**entry), "b.png": KnownPicture(**of_val)}
    digests |= {"pictures": pictures_digest(known)}
    split = FittedSplit(9, 0, 0, LENGTHS)
    write_account(fitted / "account.json", FittedRows("fire", "trajectory", 64, split, split, digests))
    change(merged, lambda record: record["training"]["digests"].update(data="".join(digests.values())))

    def found() -> str:
        main(merged, directory)
        return next(line for line in capsys.readouterr().out.split("\n") if "pictures of these rows" in line)

    assert found() == f"not here  pictures of these rows: {manifest}"
    manifest.write_text(json.dumps(entry))
    (directory / "images" / "fire" / "val.jsonl").write_text(json.dumps(of_val))
    assert found() == "ok        pictures of these rows: 2 of 2 files"
    (store / "a.png").write_bytes(b"another")
    assert not main(merged, directory)
    assert f"{store}/a.png: expected {of(b'picture')}, found {of(b'another')}" in capsys.readouterr().out
    manifest.write_text(json.dumps(entry | {"sha256": of(b"another")}))
    assert found().startswith("DIFFERS"), "the account of the rows has another digest"
    manifest.write_text("{")
    assert found().startswith("DIFFERS")


def test_damaged_accounts_of_the_working_directory_stop_nothing(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model's manifest is not the run's; an account of its own rows that cannot be read is a difference."""
    (merged.parent / "models" / "another").mkdir(parents=True)
    (merged.parent / "models" / "another" / "manifest.json").write_text("{")
    assert main(merged, merged.parent)
    assert verdicts(capsys.readouterr().out)[-1] == "not here"
    (merged.parent / "fitted" / "mine").mkdir(parents=True)
    (merged.parent / "fitted" / "mine" / "account.json").write_text('{"dataset": 3}')
    assert not main(merged, merged.parent)
    said = capsys.readouterr().out
    assert verdicts(said)[2] == "DIFFERS"
    assert len(verdicts(said)) == 9


def test_a_run_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "merged" / "mine").mkdir(parents=True)
    with pytest.raises(VlmflowError, match="finished here: mine"):
        published(tmp_path, "other")


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: record["merged"].update({"../../etc/passwd": "0"}),
        lambda record: record["data"]["raw"]["train"].append({"file": "raw/fire/../../passwd", "sha256": "0"}),
        lambda record: record["training"]["digests"]["released"].update({"a/../../b": "0"}),
        lambda record: record["picture_limits"].update(file="/etc/passwd"),
        lambda record: record.update(run=".."),
        lambda record: record["data"].update(dataset="a/b"),
        lambda record: record["data"].update(members={"..": {"digests": {}}}),
        lambda record: record["data"].update(members={"fire": {"digests": {"../../etc/passwd": "0"}}}),
        lambda record: record["merged"].update({"a\0b": "0"}),
        lambda record: record.update(merged=["config.json"]),
    ],
)
def test_a_hostile_provenance_is_refused(merged: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    change(merged, edit)
    with pytest.raises(VlmflowError, match=r"provenance\.json: "):
        main(merged, None)


def test_no_name_steers_the_terminal(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(merged, lambda record: record["merged"].update({"a\x1b[2Jb": "\x1b[2J"}))
    assert not main(merged, None)
    assert "\x1b" not in capsys.readouterr().out


@pytest.fixture
def second(merged: Path) -> Path:
    """Return a published folder alone whose base is the weights of `mine`."""
    first = json.loads((merged / "provenance.json").read_text())
    of_all = digest_of_files(first["merged"])

    def edit(record: dict[str, Any]) -> None:
        record.update(run="second", base_model={"digest": of_all, "files": first["merged"], "provenance": first})
        record["training"]["digests"]["model"] = of_all
        record["picture_limits"]["proven"] = of(LIMITED)

    change(merged, edit)
    return merged


def test_the_chain_goes_on_through_the_run_that_made_the_base(second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(second, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line[10:].partition(":")[0] for line in lines[4:]] == ["base mine"] * 3
    assert "ok        base mine: published files: the recorded digests of 3 files are those of the base" in lines[5]
    (second.parent / "raw" / "fire").mkdir(parents=True)
    (second.parent / "raw" / "fire" / "a.json").write_bytes(b"other")
    assert not main(second, second.parent)
    assert "DIFFERS   base mine: raw files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda base: base["files"].update({"model.safetensors": "0"}), "model.safetensors: expected .*, found 0"),
        (lambda base: base["files"].pop("config.json"), "config.json: expected .*, found is missing"),
        (lambda base: base["provenance"]["merged"].pop("config.json"), "config.json: expected no such file"),
        (lambda base: base.update(digest="0"), "digest of all files: expected .*, found 0"),
    ],
)
def test_a_base_of_other_weights_than_its_run_published_is_found(
    second: Path, edit: Callable[[dict[str, Any]], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(second, lambda record: edit(record["base_model"]))
    assert not main(second, None)
    assert re.search(said, capsys.readouterr().out.partition("base mine: published files")[2])


def test_the_files_in_fp8_are_compared_where_they_are(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, in_fp8, digests = merged.parent / "work", merged.parent / "fp8", {"a.safetensors": of(b"fp8")}
    recorded = {"digest": digest_of_files(digests), "files": digests}
    change(merged, lambda record: record["base_model"].update(dequantized_from=recorded))
    in_fp8.mkdir()
    (in_fp8 / "a.safetensors").write_bytes(b"fp8")
    work.mkdir()
    assert main(merged, work)
    assert "not here  files in FP8 of the base model" in capsys.readouterr().out
    write_account(
        work / "models" / "m" / "manifest.json",
        ModelManifest("m", "fp8", None, work, {}, [], "d", InFp8(in_fp8, {}, recorded["digest"])),
    )
    assert main(merged, work)
    assert "ok        files in FP8 of the base model: 1 of 1 files" in capsys.readouterr().out
    change(merged, lambda record: record["base_model"]["dequantized_from"].update(digest="0"))
    assert not main(merged, work)
    assert f"digest of all files: expected {recorded['digest']}, found 0" in capsys.readouterr().out
    (in_fp8 / "a.safetensors").write_bytes(b"other")
    assert not main(merged, work)
    assert f"expected {of(b'fp8')}, found {of(b'other')}" in capsys.readouterr().out
    change(merged, lambda record: record["base_model"]["dequantized_from"]["files"].update({"../x": "0"}))
    with pytest.raises(VlmflowError, match=r"'\.\./x' is no name inside a folder"):
        main(merged, work)


def test_a_hostile_provenance_of_the_base_is_refused(second: Path) -> None:
    change(second, lambda record: record["base_model"]["provenance"].update(run="../x"))
    with pytest.raises(VlmflowError, match=r"'\.\./x' is no name inside a folder"):
        main(second, None)
    (second / "provenance.json").write_text('{"base_model": {"provenance": ' * 900 + "{}" + "}}" * 900)
    with pytest.raises(VlmflowError, match=r"provenance\.json"):
        main(second, None)
