"""The stage fetch_model: models from the hub and from local folders, the manifest, and its rule."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml

from faulty_server import Answer, refuses
from fp8_files import ONE, WEIGHT, made_model, write
from hub_server import REVISION, HubServer, command, served_hub, sha256
from stages import fetch_model, fetch_model_files
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.fetch.model_files import list_files
from vlmflow.fetch.placed import FileRecord, digest_of, read_model_manifest, read_small_files, tensors_of
from workflow_runs import one_rule

SOURCE = "hf://o/m"
PLAIN = {"config.json": b"{}", "extra/merges.txt": b"a b\n", "LICENSE": b"free"}
OTHERS = {"README.md": b"# m\n", "custom_generate/generate.py": b"1 / 0", ".gitattributes": b"* lfs"}
LEFT_OUT = ["README.md", "custom_generate/generate.py"]
WEIGHTS = {f"model-{part}-of-3.safetensors": Random(part).randbytes(800_000 + part) for part in (1, 2, 3)}
MODEL = {**PLAIN, **WEIGHTS}
SIZE = sum(map(len, MODEL.values()))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add(SOURCE.removeprefix("hf://"), {**PLAIN, **OTHERS, **WEIGHTS}, plain=(*PLAIN, *OTHERS))
        yield hub_server


class Place:
    """A working directory, and the stage run in it."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "models" / "tiny"
        self.store = folder / "stores" / "models"
        self.pins = folder / "pins.yaml"
        self.stored = self.store / f"o--m@{REVISION}"

    def fetch(
        self, source: object = SOURCE, revision: str = REVISION, *, dequantize: bool = False, **pin: object
    ) -> None:
        self.pin(revision=revision, **pin)
        how = {"store": self.store, "pins": self.pins, "threads": 3, "dequantize": dequantize}
        fetch_model.main(model=self.model, source=str(source), **how)

    def pin(self, **pin: object) -> None:
        self.pins.write_text(yaml.dump({SOURCE: pin}))

    @property
    def manifest(self) -> dict:
        return json.loads((self.model / "manifest.json").read_text())

    @property
    def seen(self) -> dict[str, Path]:
        """The files that stages see, by name."""
        folder = Path(self.manifest["folder"])
        assert folder.parent == self.store / "views"
        return {str(path.relative_to(folder)): path.resolve() for path in folder.rglob("*") if path.is_symlink()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    for name, content in {**MODEL, **OTHERS, ".cache/x": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def digest(files: dict[str, bytes]) -> str:
    pairs = sorted([name, sha256(content)] for name, content in files.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def test_a_model_is_fetched_with_all_its_files(server: HubServer, place: Place):
    place.fetch()
    assert [path.name for path in place.model.iterdir()] == ["manifest.json"]
    assert place.manifest == {
        "name": "tiny",
        "source": SOURCE,
        "revision": REVISION,
        "folder": place.manifest["folder"],
        "files": {name: {"bytes": len(content), "sha256": sha256(content)} for name, content in sorted(MODEL.items())},
        "left_out": LEFT_OUT,
        "digest": digest(MODEL),
    }
    stored = {str(path.relative_to(place.stored)) for path in place.stored.rglob("*") if path.is_file()}
    assert stored == {*MODEL, ".left-out.json"}
    assert place.seen == {name: place.stored / name for name in MODEL}
    assert not any(server.sent(name) for name in OTHERS)
    assert all((place.stored / name).read_bytes() == content for name, content in MODEL.items())
    assert read_model_manifest(place.model).digest == digest(MODEL)
    assert not server.leaked


def test_files_in_the_store_are_not_fetched_again(server: HubServer, place: Place):
    place.fetch()
    first = place.manifest
    asked = len(server.requests)
    place.fetch(size=SIZE, sha256=digest(MODEL))  # fully pinned: no request is needed
    assert len(server.requests) == asked
    (place.stored / "config.json").write_bytes(b"[]")
    place.fetch(size=SIZE, sha256=digest(MODEL))
    assert place.manifest == first
    (place.stored / "model-2-of-3.safetensors").unlink()
    place.fetch(size=SIZE, sha256=digest(MODEL))
    assert place.manifest == first
    assert [server.sent(f"model-{part}-of-3.safetensors") // 800_000 for part in (1, 2, 3)] == [1, 2, 1]
    assert read_model_manifest(place.model).files.keys() == MODEL.keys()


def test_a_killed_fetch_resumes_file_by_file(server: HubServer, place: Place):
    """SIGKILL in the middle of several files; received bytes are not requested again."""
    server.pace = 0.05
    place.pin(revision=REVISION)
    call = command("fetch_model", model=place.model, source=SOURCE, store=place.store, pins=place.pins, threads=2)
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = [unfinished(place.stored / name) for name in WEIGHTS]
    while sum(part.stat().st_size for part in parts if part.exists()) < 500_000:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not place.model.exists()
    kept = {part.name.removesuffix(".part"): part.stat().st_size for part in parts if part.exists()}
    server.pace = 0.0
    server.requests.clear()
    place.fetch()
    assert place.manifest["digest"] == digest(MODEL)
    for name, size in kept.items():
        assert server.ranges(name) == [f"bytes={size}-" if size else None]


def test_one_bad_file_does_not_cost_the_others(server: HubServer, place: Place):
    """The received files of a failed fetch are kept."""
    part = unfinished(place.stored / "model-3-of-3.safetensors")

    def refused_late(answer: Answer) -> Answer:
        deadline = time.monotonic() + 20  # before the client's timeout
        while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        return refuses(403)(answer)

    server.faults[("head", "model-2-of-3.safetensors")] = [refused_late]
    server.pace = 0.5
    with pytest.raises(VlmflowError, match=r"hf://o/m/model-2-of-3\.safetensors is gated, .*\(403\)"):
        place.fetch()
    assert not place.model.exists()
    kept = part.stat().st_size
    assert kept > 0
    server.pace = 0.0
    server.requests.clear()
    place.fetch()
    assert place.manifest["digest"] == digest(MODEL)
    assert server.ranges("model-3-of-3.safetensors") == [f"bytes={kept}-"]


@pytest.mark.parametrize(
    ("pin", "cause"),
    [
        ({"size": 7}, f"size is {SIZE} on the hub, 7 in pins.yaml"),
        ({"sha256": "0" * 64}, f"sha256 is {digest(MODEL)} on the hub, {'0' * 64} in pins.yaml"),
        ({"revision": "2" * 40}, f"there is no commit {'2' * 40}"),
        ({"revision": None}, r"pins\.yaml: hf://o/m has no revision"),
    ],
)
def test_another_model_than_the_pinned_one_is_refused(
    server: HubServer, place: Place, pin: dict[str, object], cause: str
):
    """A moved revision."""
    with pytest.raises(VlmflowError, match=cause):
        place.fetch(**pin)
    assert not place.model.exists()


def test_a_model_without_safetensors_is_refused_by_name(server: HubServer, place: Place, tmp_path: Path):
    server.add("o/m", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(VlmflowError, match=r"hf://o/m has no safetensors weights, but pytorch_model\.bin"):
        place.fetch()
    assert not server.sent("pytorch_model.bin")
    with pytest.raises(VlmflowError, match="has no safetensors weights"):
        list_files(tmp_path, "models.tiny.source")


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_local_folder_is_described_in_place(place: Place, local: Path, form: str):
    place.fetch(form.format(local))
    assert place.seen == {name: local / name for name in MODEL}
    assert place.manifest["revision"] is None
    assert place.manifest["digest"] == digest(MODEL)
    assert set(place.manifest["files"]) == set(MODEL)
    assert place.manifest["left_out"] == LEFT_OUT
    assert [path.name for path in place.store.iterdir()] == ["views"]


def test_the_hubs_own_cache_is_a_local_folder(place: Place, local: Path, tmp_path: Path):
    """Its snapshots contain links to blobs, which belong to the model; the folder itself may also be a link."""
    repo = tmp_path / "hub" / "models--o--m"
    snapshot, blobs = repo / "snapshots" / REVISION, repo / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    local.rename(snapshot)
    for name, content in MODEL.items():
        (snapshot / name).rename(blobs / sha256(content))
        (snapshot / name).symlink_to(os.path.relpath(blobs / sha256(content), (snapshot / name).parent))
    (tmp_path / "link").symlink_to(snapshot)
    place.fetch(tmp_path / "link")
    assert place.manifest["digest"] == digest(MODEL)
    assert place.seen == {name: blobs / sha256(content) for name, content in MODEL.items()}


def test_the_view_of_a_model_is_made_once_and_contains_only_its_files(place: Place, local: Path, tmp_path: Path):
    place.fetch(local)
    seen = Path(place.manifest["folder"])
    inode = seen.stat().st_ino
    place.fetch(local)
    assert Path(place.manifest["folder"]).stat().st_ino == inode, "a stage that runs kept its folder"
    (seen / "args.json").write_text("{}")
    with pytest.raises(VlmflowError, match=r"holds args\.json, which vlmflow did not put there\n.*remove it, because"):
        read_model_manifest(place.model)
    place.fetch(local)
    assert read_model_manifest(place.model).folder == seen
    (seen / "config.json").unlink()
    (seen / "config.json").symlink_to(tmp_path / "another")
    place.fetch(local)
    assert place.seen == {name: local / name for name in MODEL}


def test_a_hub_model_that_names_code_is_refused_before_its_weights_are_fetched(server: HubServer, place: Place):
    config = b'{"auto_map": {"AutoModel": "modeling_x.Model"}}'
    server.add("o/m", {**MODEL, "config.json": config}, plain=tuple(PLAIN))
    with pytest.raises(VlmflowError, match=r"config\.json: auto_map = .*modeling_x\.Model"):
        place.fetch()
    assert not place.model.exists()
    assert not any(server.sent(name) for name in WEIGHTS)


def test_a_hub_model_in_fp8_becomes_a_bfloat16_base(server: HubServer, place: Place, tmp_path: Path):
    """pins.yaml has the digest of the files in FP8. Without the key the weights are not even fetched."""
    published = {file.name: file.read_bytes() for file in write(tmp_path / "m", made_model()).iterdir()}
    server.add("o/m", published, plain=tuple(name for name in published if not name.endswith(".safetensors")))
    with pytest.raises(VlmflowError, match=r"is quantised \(fp8\), .*\n.*set models\.NAME\.dequantize: true"):
        place.fetch()
    assert not server.sent(ONE)
    pin = {"size": sum(map(len, published.values())), "sha256": digest(published)}
    place.fetch(dequantize=True, **pin)
    manifest = read_model_manifest(place.model)
    assert manifest.dequantized_from.digest == digest(published)
    assert manifest.dequantized_from.folder == place.stored
    assert {file.parent for file in place.seen.values()} == {place.store / "bfloat16" / digest(published)[:16]}
    asked = len(server.requests)
    small = place.model.parent / "small"
    fetch_model_files.main(files=small, source=SOURCE, store=place.store, pins=place.pins, dequantize=True)
    assert read_small_files(small).joinpath("config.json").read_bytes() == place.seen["config.json"].read_bytes()
    assert tensors_of(small) == ["experts.up", WEIGHT, "norm.weight", "odd"]
    place.fetch(dequantize=True, **pin)
    assert read_model_manifest(place.model) == manifest
    assert len(server.requests) == asked


def test_a_missing_or_changed_model_is_reported(place: Place, local: Path, tmp_path: Path):
    place.fetch(local)
    manifest = (place.model / "manifest.json").read_text()
    (local / "config.json").write_bytes(b"{} ")
    with pytest.raises(VlmflowError, match=r"config\.json has 3 bytes; it had 2 when it was fetched\n.*remove"):
        read_model_manifest(place.model)
    (local / "config.json").unlink()
    with pytest.raises(VlmflowError, match=r"config\.json is missing"):
        read_model_manifest(place.model)
    local.rename(tmp_path / "elsewhere")
    with pytest.raises(VlmflowError, match=r"local/LICENSE is missing"):
        read_model_manifest(place.model)
    shutil.rmtree(place.store)
    with pytest.raises(VlmflowError, match=r"its folder .* is missing"):
        read_model_manifest(place.model)
    (place.model / "manifest.json").write_text(manifest.replace('"digest"', '"digset"'))
    with pytest.raises(VlmflowError, match=r"manifest\.json: digest is missing\n.*remove"):
        read_model_manifest(place.model)
    (place.model / "manifest.json").unlink()
    with pytest.raises(VlmflowError, match=r"manifest\.json"):
        read_model_manifest(place.model)


def test_the_digest_depends_only_on_names_and_bytes():
    one = {"a": FileRecord(bytes=1, sha256="0" * 64), "b": FileRecord(bytes=1, sha256="1" * 64)}
    assert digest_of(one) == digest_of(dict(reversed(one.items())))
    assert digest_of(one) != digest_of({"a": one["b"], "b": one["a"]})


def test_the_rule_takes_a_local_folder_as_its_input(local: Path, tmp_path: Path):
    sources = {"tiny": "local", "missing": "nowhere", "big": "hf://o/big"}
    models = {name: {"source": source, "model_type": "qwen3_vl"} for name, source in sources.items()}
    models["fp8"] = models["tiny"] | {"dequantize": True}
    snakemake = one_rule(tmp_path, "fetch_model", models=models)
    (tmp_path / "pins.yaml").write_text("hf://o/big:\n")

    assert "models.missing.source: no folder nowhere" in snakemake("models/missing", "-n")
    assert "1 of 1 steps" in snakemake("models/tiny")
    assert read_model_manifest(tmp_path / "models" / "tiny").digest == digest(MODEL)
    (local / "README.md").write_bytes(b"another page")
    assert "Nothing to be done" in snakemake("models/tiny", "-n")
    (local / "config.json").write_bytes(b"{ }")
    planned = snakemake("models/tiny", "models/big", "-n")
    assert "Updated input files: local/config.json" in planned
    assert "Fetching the model big" in planned
    (local / "config.json").write_bytes(b'{"quantization_config": {"quant_method": "fp8"}}')
    assert "local/config.json: the base is quantised (fp8)" in snakemake("models/tiny", "-n")
    assert "Fetching the model fp8" in snakemake("models/fp8", "-n")
    (local / "config.json").write_bytes(b"{}")
    assert "local/config.json: the base is not quantised" in snakemake("models/fp8", "-n")
    (local / "config.json").write_bytes(b'{"auto_map": {"AutoConfig": "x.X"}}')
    assert 'local/config.json: auto_map = {"AutoConfig": "x.X"}: names Python code' in snakemake("models/tiny", "-n")
