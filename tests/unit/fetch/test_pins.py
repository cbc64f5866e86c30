"""The table of pins, and the command that fills it in."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from faulty_server import refuses
from hub_server import REVISION, HubServer, served_hub, sha256
from vlmflow.config.tables import Pin, read_pins, revision_of, write_pins
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import FileRecord, digest_of
from vlmflow.tools import make_pins
from workflow_runs import ROOT

REPOSITORY = ROOT
TABLE = REPOSITORY / "pins.yaml"
DATA, MODEL = "hf://datasets/o/d/train.json", "hf://o/m"
HEAD = "# What this is.\n#\n# A second paragraph.\n\n"
NEWEST = "3" * 40


def test_the_projects_own_table_is_complete():
    pins = read_pins(TABLE)
    fire = "hf://datasets/PengxiangLi/FIRE/FIRE-train-100K.json"
    assert pins[fire].revision == "73b9f1397a8a50d944a7650a60ecda39140c2fc1"
    assert revision_of(fire) == pins[fire].revision
    assert revision_of("hf://o/never") is None
    assert revision_of("some/path.json") is None


def test_every_hub_source_of_the_real_runs_has_a_row():
    config = yaml.safe_load((REPOSITORY / "config.yaml").read_text())
    sources = [model["source"] for model in config["models"].values()]
    sources += [block[split] for block in config["datasets"].values() for split in ("train", "test") if split in block]
    assert set(sources) <= set(read_pins(TABLE))


def test_a_row_for_several_files_becomes_a_row_for_each(server: HubServer, tmp_path: Path):
    files = [f"data/train-0000{number}-of-00003.parquet" for number in range(3)]
    server.add("datasets/o/d", {name: name.encode() * number for number, name in enumerate(files, start=1)})
    table = tmp_path / "pins.yaml"
    table.write_text(HEAD + "hf://datasets/o/d/data/train-*-of-00003.parquet:\n")
    make_pins.main(pins=table)
    pins = read_pins(table)
    assert list(pins) == [f"hf://datasets/o/d/{name}" for name in files]
    assert [pin.size for pin in pins.values()] == [len(files[0]) * number for number in (1, 2, 3)]
    assert {pin.revision for pin in pins.values()} == {REVISION}
    assert "*" not in table.read_text()


def test_writing_what_was_read_changes_nothing(tmp_path: Path):
    copy = tmp_path / "pins.yaml"
    copy.write_bytes(TABLE.read_bytes())
    write_pins(copy, read_pins(copy))
    assert copy.read_bytes() == TABLE.read_bytes()


def test_values_of_digits_stay_text(tmp_path: Path):
    table = tmp_path / "pins.yaml"
    table.write_text(HEAD)
    pin = Pin(revision="1" * 40, size=0, sha256="12e4" + "0" * 60)
    write_pins(table, {DATA: pin})
    assert read_pins(table) == {DATA: pin}
    assert table.read_text().startswith(HEAD)


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        (
            f"{DATA}:\n  revison: {REVISION}",
            rf"pins.yaml: {DATA}.revison: unknown key; .*nearest known key: revision",
        ),
        (f"{DATA}:\n  revision: main", rf"pins.yaml: {DATA}.revision: 'main' is not allowed; .*40"),
        (f"{DATA}:\n  size: -1", rf"pins.yaml: {DATA}.size: -1 is not allowed; .*at least 0"),
        (f"{DATA}:\n  sha256: {'A' * 64}", rf"{DATA}.sha256: 'A+' is not allowed"),
        (f"{DATA}: {REVISION}", rf"{DATA}: 1+ is not allowed"),
        (f"hf://datasets/o/d@{REVISION}/x.json:", r"pins.yaml: 'hf://.*' contains its revision"),
        ("raw/train.json:", r"pins.yaml: 'raw/train.json' is not a hub address"),
        ("hf://datasets/o/d:", r"pins.yaml: 'hf://datasets/o/d' is not a known form of address"),
        ("[1, 2]", r"pins.yaml"),
        ("a: b: c", r"pins.yaml, line 1, column 5: mapping values are not allowed here"),
    ],
)
def test_an_error_is_one_clear_line(tmp_path: Path, table: str, cause: str):
    (tmp_path / "pins.yaml").write_text(table)
    with pytest.raises(VlmflowError, match=cause) as raised:
        read_pins(tmp_path / "pins.yaml")
    assert "\n" not in raised.value.cause


def test_a_missing_table_is_reported(tmp_path: Path):
    with pytest.raises(VlmflowError, match=r"pins\.yaml: .*No such file"):
        read_pins(tmp_path / "pins.yaml")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add("datasets/o/d", {"train.json": b"[1]", "small.json": b"[]"}, plain=("small.json",))
        files = {"model.safetensors": b"weights", "config.json": b"{}", ".gitattributes": b"*"}
        hub_server.add("o/m", files, plain=("config.json", ".gitattributes"), revision=NEWEST)
        yield hub_server


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "pins.yaml"


def test_empty_values_are_filled_in(server: HubServer, table: Path, caplog: pytest.LogCaptureFixture):
    """A data file in LFS and one outside it, and a model without a chosen revision."""
    caplog.set_level("INFO", "vlmflow")
    small = "hf://datasets/o/d/small.json"
    table.write_text(f"{HEAD}{DATA}:\n  revision: '{REVISION}'\n  size:\n  sha256:\n{small}:\n{MODEL}:\n")
    make_pins.main(pins=table)
    model = {
        "config.json": FileRecord(bytes=2, sha256=sha256(b"{}")),
        "model.safetensors": FileRecord(bytes=7, sha256=sha256(b"weights")),
    }
    assert read_pins(table) == {
        DATA: Pin(revision=REVISION, size=3, sha256=sha256(b"[1]")),
        small: Pin(revision=REVISION, size=2, sha256=sha256(b"[]")),
        MODEL: Pin(revision=NEWEST, size=9, sha256=digest_of(model)),
    }
    assert table.read_text().startswith(HEAD)
    assert f"{DATA}: size 3, sha256 {sha256(b'[1]')}" in caplog.text
    assert f"{MODEL}: revision {NEWEST}" in caplog.text
    assert not server.sent("model.safetensors")
    written = table.read_bytes()
    make_pins.main(pins=table)
    assert table.read_bytes() == written
    assert f"{MODEL}: unchanged" in caplog.text


def test_a_pin_is_moved_only_on_purpose(server: HubServer, table: Path):
    """A moved revision is reported, and the table keeps its values until somebody empties the row."""
    for wrong in ({"size": 7}, {"sha256": "0" * 64}, {"revision": "2" * 40}):
        row = {"revision": REVISION, "size": 3, "sha256": sha256(b"[1]"), **wrong}
        table.write_text(yaml.safe_dump({DATA: row}))
        with pytest.raises(VlmflowError, match="in the table" if "revision" not in wrong else "no commit"):
            make_pins.main(pins=table)
        assert read_pins(table) == {DATA: Pin(**row)}
    server.repos["datasets/o/d"].revision = NEWEST
    table.write_text(yaml.safe_dump({DATA: {"revision": None, "size": 7, "sha256": "0" * 64}}))
    make_pins.main(pins=table)
    assert read_pins(table) == {DATA: Pin(revision=NEWEST, size=3, sha256=sha256(b"[1]"))}


def test_one_row_that_fails_does_not_cost_the_others(server: HubServer, table: Path):
    """For a wrong file name, the repository's files are listed."""
    table.write_text(f"hf://datasets/o/d/trian.json:\nhf://o/none:\n{MODEL}:\n")
    with pytest.raises(VlmflowError) as raised:
        make_pins.main(pins=table)
    first, second = raised.value.cause.splitlines()
    assert "no such file" in first
    assert "train.json" in first
    assert "hf://o/none: the hub does not have it" in second
    pins = read_pins(table)
    assert pins["hf://datasets/o/d/trian.json"] == Pin()
    assert pins[MODEL].revision == NEWEST


def test_a_gated_repository_is_reported(server: HubServer, table: Path):
    server.faults[("api", "o/m")] = [refuses(403, X_Error_Code="GatedRepo")]
    table.write_text(f"{MODEL}:\n")
    with pytest.raises(VlmflowError, match="granted access"):
        make_pins.main(pins=table)
