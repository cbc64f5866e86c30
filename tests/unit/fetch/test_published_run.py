"""The weights of a finished run as a base model: just the files that it published, and its provenance beside them."""

import json
from pathlib import Path

import pytest

from made_accounts import some_provenance
from stages.fetch_model import main as fetch_model
from stages.fetch_model_files import main as fetch_model_files
from stages.publish_merged import provenance_of
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import remove, sha256_of
from vlmflow.fetch.placed import read_model_manifest, read_small_files
from vlmflow.reports.provenance import Provenance

FILES = {"config.json": b"{}", "model.safetensors": b"\2" + bytes(7) + b"{}", "tokenizer.json": b"{}"}


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Return a published run that was never trained: merged/first."""
    folder = tmp_path / "merged" / "first"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    digests = {name: sha256_of(folder / name) for name in FILES}
    write_account(folder / "provenance.json", some_provenance(run="first", merged=digests))
    (folder / "README.md").write_text("card")
    (folder / ".snakemake_timestamp").touch()
    return folder


def fetched(merged: Path) -> Path:
    """Fetch it as the model m, and return models/m."""
    model = merged.parents[1] / "models" / "m"
    fetch_model(model=model, source="merged/first", store=merged.parents[1] / "store", merged=[merged])
    return model


def test_a_base_has_the_published_files_alone_and_keeps_its_provenance(merged: Path) -> None:
    model = fetched(merged)
    manifest = read_model_manifest(model)
    assert (manifest.source, manifest.revision, manifest.left_out) == ("merged/first", None, [])
    assert manifest.files.keys() == FILES.keys()
    assert (manifest.folder / "model.safetensors").samefile(merged / "model.safetensors"), "nothing is copied"
    found = provenance_of(model, manifest)
    assert found == read_account(merged / "provenance.json", Provenance)
    remove(merged)
    read_model_manifest(model)  # a stage that reads it goes on, while the run is made again


def test_another_licence_of_the_base_is_no_other_model(merged: Path) -> None:
    """Else the second run would train again, whose weights do not depend on it."""
    before = read_model_manifest(fetched(merged)).digest
    file = merged / "provenance.json"
    file.write_text(file.read_text().replace('"licence": "unknown"', '"licence": "mit"'))
    model = fetched(merged)
    assert read_model_manifest(model).digest == before
    assert '"licence": "mit"' in (model / "provenance.json").read_text()


def test_its_small_files_are_those_of_the_runs_own_model(tmp_path: Path) -> None:
    """So lengths and estimate of the second run are known before the first is trained."""
    (tmp_path / "tiny").mkdir()
    for name, content in FILES.items():
        (tmp_path / "tiny" / name).write_bytes(content)
    first, second = tmp_path / "model_files" / "tiny", tmp_path / "model_files" / "m"
    fetch_model_files(files=first, source=str(tmp_path / "tiny"), store=tmp_path / "store")
    fetch_model_files(files=second, source="merged/first", store=tmp_path / "store", base=[first])
    assert {file.name for file in read_small_files(second).iterdir()} == {"config.json", "tokenizer.json"}
    (first / "files" / "config.json").write_text("{} ")
    with pytest.raises(VlmflowError, match="1 of 2 model files have changed"):
        fetch_model_files(files=second, source="merged/first", store=tmp_path / "store", base=[first])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_changed_or_missing_file_is_refused(merged: Path, name: str) -> None:
    (merged / name).write_bytes(b"other")
    with pytest.raises(VlmflowError, match=rf"1 files differ from those that provenance\.json names: {name}"):
        fetched(merged)
    (merged / name).unlink()
    with pytest.raises(VlmflowError, match=rf"1 files differ from those that provenance\.json names: {name}"):
        fetched(merged)


def test_no_name_leads_out_of_the_folder(merged: Path) -> None:
    record = json.loads((merged / "provenance.json").read_text())
    record["merged"]["../../secret.json"] = "0"
    (merged / "provenance.json").write_text(json.dumps(record))
    with pytest.raises(VlmflowError, match=r"'\.\./\.\./secret\.json' is no name inside a folder"):
        fetched(merged)


def test_the_provenance_of_other_weights_is_not_published(merged: Path) -> None:
    model = fetched(merged)
    write_account(model / "provenance.json", some_provenance(run="first", merged={"model.safetensors": "other"}))
    with pytest.raises(VlmflowError, match="is of other weights than"):
        provenance_of(model, read_model_manifest(model))
