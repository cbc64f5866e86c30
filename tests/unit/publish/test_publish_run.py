"""`vlmflow publish` against the tests' hub: what is sent, what licences and others forbid, and what is read back."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from finished_runs import ADAPTER, MERGED, RUN, finished_run, rights
from hub_server import TOKEN, HubServer, Repo, served_hub, sha256
from made_accounts import some_provenance
from vlmflow.core.errors import VlmflowError
from vlmflow.publish.package import rights_of
from vlmflow.reports.licences import LicenceOfSource, StatedLicences
from vlmflow.reports.provenance import BaseModelFiles, Fp8Files
from vlmflow.tools import publish_run
from workflow_runs import vlmflow

TO = "ann/mine"
FIRST, SECOND = (sha256(MERGED[f"model-0000{number}-of-00002.safetensors"]) for number in (1, 2))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a hub without Xet, and say so to the client."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with served_hub(monkeypatch) as server:
        yield server


def publish(folder: Path, to: str = TO, *, adapter: bool = False, public: bool = False, yes: bool = True) -> None:
    publish_run.main(RUN, to, folder, adapter, public, yes)


def writes(hub: HubServer) -> list[str]:
    """Return what the hub was asked to change, in order."""
    return [request.kind for request in hub.requests if request.kind in ("create", "put", "commit", "tag")]


def refused(folder: Path, hub: HubServer, said: str, **how: bool) -> None:
    with pytest.raises(VlmflowError, match=said):
        publish(folder, **how)
    assert writes(hub) == [], "nothing may be sent before the refusal"


def sent(repo: Repo) -> dict[str, bytes]:
    return {name: content for name, content in repo.files.items() if name != ".gitattributes"}


def test_the_verified_files_are_sent_in_one_commit_and_tagged(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = finished_run(tmp_path)
    publish(tmp_path)
    repo = hub.repos[TO]
    assert repo.private
    whole = MERGED | {name: (merged / name).read_bytes() for name in ("README.md", "provenance.json")}
    assert sent(repo) == whole
    assert repo.tags == {f"vlmflow-{sha256(whole['provenance.json'])[:12]}": repo.revision}
    assert writes(hub) == ["create", "put", "put", "commit", "tag"]
    assert hub.leaked == [], "the storage gets no token"
    said = capsys.readouterr()
    total = sum(map(len, whole.values()))
    shard = f"108,000 bytes  {SECOND[:12]}  model-00002-of"
    for text in (shard, f"{total:,} bytes  in 5 files", f"{TO} (new, private)"):
        assert text in said.out
    assert "cc-by-nc-4.0 (not for commercial use" in said.out
    assert f"{hub.endpoint}/{TO}/tree/vlmflow-" in said.out
    assert TOKEN not in said.out + said.err

    publish(tmp_path)
    assert writes(hub) == ["create", "put", "put", "commit", "tag", "tag"], "the same again sends nothing"


def test_a_killed_upload_sends_only_the_rest(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)
    second, go = threading.Event(), threading.Event()

    def wait(body: bytes) -> bytes:
        if sha256(body) == SECOND and not go.is_set():
            second.set()
            go.wait(60)
            raise ConnectionError  # its client is dead: nothing is stored
        return body

    hub.on_upload = wait
    words = vlmflow("publish", RUN, "--to", TO, "--directory", tmp_path, "--yes")
    client = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    while not second.wait(0.05):
        assert client.poll() is None, client.communicate()[0].decode()
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    go.set()
    assert set(hub.repos[TO].stored) == {FIRST}
    assert sent(hub.repos[TO]) == {}, "no half of a run is in the repository"

    before = len(hub.requests)
    publish(tmp_path)
    assert [one.path for one in hub.requests[before:] if one.kind == "put"] == [SECOND]
    assert sent(hub.repos[TO]).keys() == {*MERGED, "README.md", "provenance.json"}


def test_wrong_bytes_on_the_hub_are_noticed(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)
    hub.on_upload = lambda body: body[:-1] + b"?" if sha256(body) == SECOND else body
    with pytest.raises(VlmflowError, match="1 files are not those that were sent: model-00002-of"):
        publish(tmp_path)
    assert hub.repos[TO].tags == {}


def test_a_tag_of_other_bytes_is_noticed(tmp_path: Path, hub: HubServer) -> None:
    merged = finished_run(tmp_path)
    hub.add(TO, {})
    repo = hub.repos[TO]
    repo.private = True
    repo.tags[f"vlmflow-{sha256((merged / 'provenance.json').read_bytes())[:12]}"] = repo.revision
    with pytest.raises(VlmflowError, match=r"at vlmflow-.*: 5 files are not those that were sent"):
        publish(tmp_path)


def test_a_repository_that_changes_meanwhile_gets_no_commit(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)

    def another_commit(body: bytes) -> bytes:
        hub.repos[TO].revision = "2" * 40
        return body

    hub.on_upload = another_commit
    with pytest.raises(VlmflowError, match=r"changed meanwhile.*\(412\)"):
        publish(tmp_path)
    assert sent(hub.repos[TO]) == {}


def test_a_public_repository_is_refused_unless_told(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)
    hub.add(TO, {})
    refused(tmp_path, hub, f"{TO} exists and is public")
    publish(tmp_path, public=True)
    publish(tmp_path, "ann/new", public=True)
    assert not hub.repos["ann/new"].private


def test_a_repository_with_other_files_is_refused(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)
    hub.add(TO, {"model.safetensors": b"of another run"})
    hub.repos[TO].private = True
    refused(tmp_path, hub, "files that are not of this run.*: model.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model-00001-of-00002.safetensors", b"FIRST shard" * 9_000, "1 of 3 published files have changed"),
        ("model-00001-of-00002.safetensors", None, "1 of 3 published files are missing"),
        ("modeling_mine.py", b"import os", "nobody verified these files: modeling_mine.py"),
        ("README.md", b"# The best model", "is not the card that provenance.json gives"),
    ],
)
def test_a_changed_file_is_refused_before_anything_is_sent(
    tmp_path: Path, hub: HubServer, name: str, content: bytes | None, said: str
) -> None:
    file = finished_run(tmp_path) / name
    file.unlink() if content is None else file.write_bytes(content)
    refused(tmp_path, hub, said)


def test_a_licence_that_forbids_it_is_refused(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path, rights=rights(pictures="Proprietary, of the museum"))
    refused(tmp_path, hub, r"forbids to pass on .*Proprietary, of the museum: pictures of coco \(9 rows\)")


def test_a_licence_of_the_data_that_made_the_base_counts_too(tmp_path: Path, hub: HubServer) -> None:
    first = some_provenance(run="first", rights=rights("no redistribution"))
    finished_run(tmp_path, base_model=BaseModelFiles("merged/first", None, "digest", {}, [], first))
    refused(tmp_path, hub, "forbids to pass on .*no redistribution: data set fire")


def test_without_a_yes_nothing_is_sent(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    publish(tmp_path, yes=False)
    assert asked == [f"Send all of it to {TO}? [y/N] "]
    assert "nothing sent" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    refused(tmp_path, hub, "there is no terminal to ask on", yes=False)


def test_the_adapter_goes_alone_and_names_no_path_of_this_machine(tmp_path: Path, hub: HubServer) -> None:
    finished_run(tmp_path)
    publish(tmp_path, adapter=True)
    files = sent(hub.repos[TO])
    assert files.keys() == {*ADAPTER, "README.md"}
    assert files["adapter_model.safetensors"] == ADAPTER["adapter_model.safetensors"]
    config = json.loads(files["adapter_config.json"])
    assert config == {"base_model_name_or_path": "Qwen/Qwen3-8B", "revision": "abc", "r": 8}
    card = huggingface_hub.ModelCard(files["README.md"].decode()).data
    assert (card.base_model, card.to_dict()["base_model_relation"]) == ("Qwen/Qwen3-8B", "adapter")
    assert not any(b"/home/ann" in content for content in files.values())


def test_the_card_of_an_adapter_says_how_its_base_in_fp8_was_used(tmp_path: Path, hub: HubServer) -> None:
    in_fp8 = Fp8Files("digest of FP8", {})
    finished_run(tmp_path, base_model=BaseModelFiles("hf://o/m-FP8", "abc", "digest", {}, [], None, in_fp8))
    publish(tmp_path, adapter=True)
    files = sent(hub.repos[TO])
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "o/m-FP8"
    assert b"`quantization_config=FineGrainedFP8Config(dequantize=True)`" in files["README.md"]


def test_an_adapter_that_changed_or_was_not_proven_is_refused(tmp_path: Path, hub: HubServer) -> None:
    merged = finished_run(tmp_path)
    weights = tmp_path / "checkpoints" / RUN / "full" / "adapter_model.safetensors"
    weights.write_bytes(b"ADAPTER" * 1_000)
    refused(tmp_path, hub, "released files have changed", adapter=True)
    weights.write_bytes(ADAPTER[weights.name])
    record = json.loads((merged / "provenance.json").read_text())
    record["training"]["digests"]["job"] = "another"
    (merged / "provenance.json").write_text(json.dumps(record))
    refused(tmp_path, hub, "is not the adapter that .* was made and proven from", adapter=True)


def test_paths_of_this_machine_are_shown(tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    merged = finished_run(tmp_path)
    facts = json.loads((merged / "provenance.json").read_text())
    facts["training"]["run_folder"] = "/data/ann/runs/job"
    (merged / "provenance.json").write_text(json.dumps(facts))
    publish(tmp_path)
    assert "names of this machine in the files: /data/ann/runs/job" in capsys.readouterr().out


def test_faults_of_name_token_and_hub_say_what_to_do(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path)
    with pytest.raises(VlmflowError, match="no name of a repository on the hub"):
        publish(tmp_path, "mine")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    refused(tmp_path, hub, r"does not let this token write there \(401\)")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    refused(tmp_path, hub, "there is no token for the hub")


def test_a_hub_without_xet_is_named(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(VlmflowError, match="HF_HUB_DISABLE_XET=1"):
        publish(tmp_path)
    assert sent(hub.repos[TO]) == {}


def stated(licence: str, pictures: tuple[LicenceOfSource, ...] = ()) -> StatedLicences:
    return StatedLicences("mine", [], licence, [], list(pictures))


@pytest.mark.parametrize(
    "licence",
    [
        "proprietary",
        "Proprietary, of the museum",
        "(c) 2020, All rights reserved",
        "no redistribution",
        "may not be redistributed",
        "non-redistributable",
        "cc-by-nd-4.0",
        "CC BY-NC-ND 4.0",
        "Creative Commons NoDerivatives",
        "for internal use",
        "confidential",
    ],
)
def test_a_licence_that_forbids_to_pass_on_is_refused(licence: str) -> None:
    with pytest.raises(VlmflowError, match="forbids to pass on") as refusal:
        rights_of(stated("cc-by-4.0", (LicenceOfSource("coco", 1_234, licence),)))
    assert licence in str(refusal.value)
    assert ": pictures of coco (1,234 rows)" in str(refusal.value)
    with pytest.raises(VlmflowError, match="data set mine"):
        rights_of(stated(licence))


@pytest.mark.parametrize(
    ("licence", "shown"),
    [
        ("cc-by-4.0", "cc-by-4.0: data set mine"),
        ("apache-2.0", "apache-2.0: data set mine"),
        ("non-proprietary", "non-proprietary: data set mine"),
        ("cc-by-nc-4.0", "cc-by-nc-4.0 (not for commercial use: say so to those who get the weights): data set mine"),
        ("unknown", "not stated (that is no permission): data set mine"),
        ("mit\x1b[2J", "mit�[2J: data set mine"),
    ],
)
def test_any_other_licence_is_shown(licence: str, shown: str) -> None:
    assert [str(one) for one in rights_of(stated(licence))] == [shown]


def test_sources_of_a_licence_are_named_together_and_many_are_counted() -> None:
    sources = tuple(LicenceOfSource(f"s{number}", 9, "unknown") for number in range(12))
    first, second = map(str, rights_of(stated("mit", sources)))
    assert first == "mit: data set mine"
    assert second.endswith("pictures of s7 (9 rows) and 4 more")
