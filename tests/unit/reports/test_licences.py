"""Sources and licences in the model card."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from drawn_pictures import put
from made_accounts import some_provenance
from vlmflow.config.model import check_config
from vlmflow.core.errors import VlmflowError
from vlmflow.harness.params import RuleParams
from vlmflow.publish.package import rights_of
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import LicenceOfSource, StatedLicences, hub_datasets, stated_licences

HUB = "hf://datasets/PengxiangLi/FIRE/FIRE-train-100K.json"


def row(source: str, *images: str) -> dict[str, object]:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    whole = {"id": "x", "source": source, "images": list(images), "attempts": [1], "scores": []}
    return whole | {"conversations": talk}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    all_rows = [row("vqav2", "coco/train2017/1.jpg"), row("llava", "coco/train2017/2.jpg"), row("vqav2", "gqa/3.jpg")]
    all_rows += [row("a|b`c`\n# x", "4.jpg"), row("text")]
    return put(tmp_path / "train.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in all_rows))


def section_of(stated: StatedLicences) -> str:
    """Return the model card's section on licences."""
    return model_card(some_provenance(rights=stated)).partition("## Rights\n\n")[2].partition("\n\n## ")[0]


def test_stated_licences_are_listed_and_others_are_unknown(rows: Path) -> None:
    licences = {"gqa": "cc-by-4.0", "llava": "mit"}
    stated = stated_licences("fire", [HUB, "/home/me/FIRE-test.json"], "cc-by-4.0", licences, {}, rows)
    assert stated.sources == [HUB, "FIRE-test.json"]  # no path of this machine
    assert stated.licence == "cc-by-4.0"
    assert {(one.source, one.rows, one.licence) for one in stated.pictures} == {
        ("coco", 2, "unknown"),
        ("gqa", 1, "cc-by-4.0"),
        (".", 1, "unknown"),
    }
    assert stated.questions[0] == LicenceOfSource("vqav2", 2, "unknown")
    assert {one.source: one.licence for one in stated.questions}["llava"] == "mit"
    assert hub_datasets(stated) == ["PengxiangLi/FIRE"]


def licences_of(dataset: dict[str, object], picture_sources: dict[str, object]) -> dict[str, str]:
    merged = {
        "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
        "datasets": {"d": {"kind": "messages", "train": HUB, **dataset}},
        "runs": {"r": {"model": "m", "dataset": "d"}},
        "picture_sources": picture_sources,
    }
    return RuleParams(check_config(merged, [])).picture_licences(SimpleNamespace(run="r"))


def test_the_licence_of_a_picture_source_reaches_the_card(tmp_path: Path) -> None:
    """The longest prefix decides, COCO's pictures match by number, and the data set's own licence overrides all."""
    stated = licences_of({}, {"coco-train2017": {"licence": "cc-by-4.0"}, "gqa": {"licence": "a"}})
    assert stated["chartqa/"] == "cc-by-nc-4.0"  # from picture_sources.yaml
    stated["chartqa/own/"] = "mine"
    names = ["chartqa/train/1.png", "chartqa/2.png.rgb.png", "chartqa/own/3.png", "gqa/images/4.jpg", "sam/5.jpg"]
    names.append("coco/train2014/COCO_train2014_000000000009.jpg.rgb.png")
    lines = b"".join(json.dumps(row("s", name)).encode() + b"\n" for name in names)
    found = stated_licences("d", [HUB], None, {"gqa": "b"}, stated, put(tmp_path / "train.jsonl", lines))
    assert [(one.source, one.rows, one.licence) for one in found.pictures] == [
        ("chartqa", 2, "cc-by-nc-4.0"),
        ("chartqa", 1, "mine"),
        ("coco", 1, "cc-by-4.0"),
        ("gqa", 1, "b"),
        ("sam", 1, "unknown"),
    ]
    assert "| pictures of `chartqa` | 2 | cc-by-nc-4.0 |" in section_of(found)


def test_rows_without_pictures_wait_for_no_picture_licence() -> None:
    assert licences_of({"modality": "text"}, {"gqa": {"licence": "a"}}) == {}


def test_the_section_is_a_table_whatever_the_sources_are_called(rows: Path) -> None:
    section = section_of(stated_licences("fire", [HUB], None, {}, {}, rows))
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert "| data set `fire` | | unknown |" in table
    assert "| pictures of `coco` | 2 | unknown |" in table
    assert r"| questions from `a\|b'c' # x` | 1 | unknown |" in table
    assert {line.replace(r"\|", "").count("|") for line in table} == {4}


def test_a_long_list_ends_with_a_sum(tmp_path: Path) -> None:
    lines = b"".join(json.dumps(row(f"s{number:03}")).encode() + b"\n" for number in range(50))
    section = section_of(stated_licences("fire", [], None, {}, {}, put(tmp_path / "t.jsonl", lines)))
    assert "| questions from 10 more | 10 | see provenance.json |" in section


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"t\.jsonl, line 1: "):
        stated_licences("fire", [], None, {}, {}, put(tmp_path / "t.jsonl", b"{"))


def test_a_mixture_states_the_licences_of_its_data_sets(tmp_path: Path) -> None:
    merged = {
        "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
        "datasets": {
            "fire": {"kind": "fire", "train": HUB, "licence": "cc-by-4.0", "source_licences": {"gqa": "b", "vg": "c"}},
            "chats": {"kind": "messages", "modality": "text", "train": "chats.jsonl"},
            "blend": {"mix": {"fire": "all", "chats": "30%"}},
        },
        "runs": {"r": {"model": "m", "dataset": "blend"}},
    }
    settings = check_config(merged, [])
    params, run = RuleParams(settings), SimpleNamespace(run="r")
    given = params.run("dataset.all_addresses", "dataset.licence", "dataset.source_licences")(run)
    names = ["fire/chartqa/1.png", "fire/gqa/2.png", "fire/3.png"]
    lines = [row("fire/vg", name) | {"id": f"fire:train-{name}"} for name in names]
    lines.append(row("chats") | {"id": "chats:train-1"})
    file = put(tmp_path / "train.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in lines))
    stated = stated_licences("blend", *given.values(), params.picture_licences(run), file)
    assert stated.sources == [HUB, "chats.jsonl"]
    assert stated.licence == "fire: cc-by-4.0; chats: unknown"
    assert [(one.source, one.rows, one.licence) for one in stated.questions] == [
        ("fire/vg", 3, "c"),
        ("chats", 1, "unknown"),
    ]
    assert {(one.source, one.licence) for one in stated.pictures} == {
        ("fire/chartqa", "cc-by-nc-4.0"),
        ("fire/gqa", "b"),
        ("fire/.", "unknown"),
    }
    with pytest.raises(VlmflowError, match="forbids to pass on"):
        rights_of(msgspec.structs.replace(stated, licence="fire: no redistribution; chats: mit"))
