"""The stage fetch_model_files: a model's configuration and tokenizer, without its weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.numpy import save

from faulty_server import refuses
from hub_server import REVISION, HubServer, served_hub, sha256
from stages import fetch_model, fetch_model_files
from vlmflow.config.model import Config
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import INDEX, SINGLE, local_files
from vlmflow.fetch.placed import read_small_files, tensors_of
from vlmflow.harness.params import RuleParams
from vlmflow.lengths.count import TOKENIZER

SOURCE = "hf://o/m"
SMALL = {"config.json": b"{}", TOKENIZER: b'{"model": {}}', "extra/merges.txt": b"a b\n", "LICENSE": b"free"}
WEIGHTS = {f"model-{part}-of-2.safetensors": bytes(100_000) for part in (1, 2)}
OTHERS = {"README.md": b"# m\n", "modeling_x.py": b"1 / 0"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add("o/m", {**SMALL, **OTHERS, **WEIGHTS}, plain=(*SMALL, *OTHERS))
        yield hub_server


class Place:
    """A working directory, and the stage run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "model_files" / "tiny"
        self.common = {"store": folder / "stores" / "models", "pins": folder / "pins.yaml", "threads": 2}
        self.common["pins"].write_text(yaml.dump({SOURCE: {"revision": REVISION}}))

    def fetch(self, source: object = SOURCE) -> None:
        fetch_model_files.main(files=self.target, source=str(source), **self.common)

    @property
    def files(self) -> dict[str, bytes]:
        folder = read_small_files(self.target)
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    for name, content in {**SMALL, **OTHERS, **WEIGHTS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_no_weights_are_fetched(server: HubServer, place: Place) -> None:
    place.fetch()
    assert place.files == SMALL
    assert not any(server.sent(name) for name in (*WEIGHTS, *OTHERS))
    manifest = json.loads((place.target / "manifest.json").read_text())
    assert (manifest["source"], manifest["revision"]) == (SOURCE, REVISION)
    assert manifest["files"]["config.json"] == {"bytes": 2, "sha256": sha256(b"{}")}


def test_of_weights_in_one_file_only_the_header_is_fetched(server: HubServer, place: Place) -> None:
    """It names the tensors, as an index does for several files."""
    content = save({name: np.zeros(500_000) for name in ("b", "a")})
    server.add("o/m", {**SMALL, SINGLE: content}, plain=tuple(SMALL))
    place.fetch()
    assert tensors_of(place.target) == ["a", "b"]
    assert place.files == SMALL
    assert all(asked in ("bytes=0-0", "bytes=0-7") or asked.startswith("bytes=8-") for asked in server.ranges(SINGLE))
    assert server.sent(SINGLE) < 1000
    fetch_model.main(model=place.folder / "models" / "tiny", source=SOURCE, **place.common)
    shutil.rmtree(place.target)
    asked = len(server.requests)
    place.fetch()
    assert tensors_of(place.target) == ["a", "b"]
    assert len(server.requests) == asked, "the store has the weights now"


def test_a_server_that_refuses_the_header_is_named(server: HubServer, place: Place) -> None:
    """As a proxy does that lets only the hub itself through."""
    server.add("o/m", {**SMALL, SINGLE: save({"a": np.zeros(9)})}, plain=tuple(SMALL))
    server.faults[("bytes", SINGLE)] = [refuses(403)]
    with pytest.raises(VlmflowError, match="403") as caught:
        place.fetch()
    assert SINGLE in caught.value.cause
    assert caught.value.next_step.startswith("check proxies and HF_ENDPOINT")


def test_a_local_folder_needs_no_weights(place: Place, local: Path) -> None:
    """Its index may name files that are not here: it gives the tensors all the same."""
    for name in WEIGHTS:
        (local / name).unlink()
    (local / INDEX).write_text(json.dumps({"weight_map": dict(zip("ba", WEIGHTS, strict=True))}))
    place.fetch(local)
    assert tensors_of(place.target) == ["a", "b"]
    wildcards = SimpleNamespace(model="tiny")
    settings = Config(models={"tiny": {"source": str(local), "model_type": "qwen3"}}, datasets={}, runs={})
    assert len(RuleParams(settings).model_files_state(wildcards)) == len(SMALL) + 1
    assert local_files(str(local), "models.tiny.source", weights=False)
    with pytest.raises(VlmflowError, match="has no safetensors weights"):
        fetch_model.main(model=place.folder / "models" / "tiny", source=str(local), **place.common)


def test_both_fetches_share_the_files(server: HubServer, place: Place) -> None:
    """Whichever comes first, and a complete model in the store needs no network."""
    place.fetch()
    sent = server.sent(TOKENIZER)
    fetch_model.main(model=place.folder / "models" / "tiny", source=SOURCE, **place.common)
    assert server.sent(TOKENIZER) == sent
    shutil.rmtree(place.target)
    asked = len(server.requests)
    place.fetch()
    assert place.files == SMALL
    assert len(server.requests) == asked


def test_a_local_folder_gives_copies(place: Place, local: Path) -> None:
    place.fetch(local)
    assert place.files == SMALL
    (local / "config.json").write_bytes(b"[]")
    assert place.files == SMALL


def test_a_model_that_names_code_is_refused(server: HubServer, place: Place, local: Path) -> None:
    code = b'{"auto_map": {"AutoModel": "modeling_x.Model"}}'
    server.add("o/m", {**SMALL, **WEIGHTS, "config.json": code}, plain=tuple(SMALL))
    (local / "config.json").write_bytes(code)
    for source in (SOURCE, local):
        with pytest.raises(VlmflowError, match=r"config\.json: auto_map = "):
            place.fetch(source)
        assert not place.target.exists()


@pytest.mark.parametrize("change", ["edit", "remove", "add"])
def test_changed_copies_are_refused(place: Place, local: Path, change: str) -> None:
    place.fetch(local)
    copy = place.target / "files" / "config.json"
    if change == "edit":
        copy.write_bytes(b"[]")
    elif change == "remove":
        copy.unlink()
    else:
        (place.target / "files" / "args.json").write_bytes(b"{}")
    with pytest.raises(VlmflowError, match="model_files/tiny and run the same command again"):
        read_small_files(place.target)
