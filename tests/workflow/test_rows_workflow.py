"""Every kind of raw rows, from its file to data/NAME/stats.json, with Snakemake."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from forked_snakemake import called
from made_rows import fire_row, write_array, write_picture
from vlmflow.config.model import check_config
from vlmflow.harness.inputs import RuleInputs
from vlmflow.rows.sharegpt import json_schema
from vlmflow.rows.training_data import validated_data
from workflow_runs import ROOT, SPEED, speeds

PICTURES = [f"gqa/images/{number}.png" for number in range(30)]
DATASETS: dict[str, dict[str, Any]] = {
    "volcano-all": {"kind": "volcano", "train": "volcano-train.json", "image_roots": ["pictures"], "test_share": 0.2},
    "volcano": {
        "kind": "volcano",
        "train": "volcano-train.json",
        "modality": "image",
        "image_roots": ["pictures"],
        "test_share": 0.2,
    },
    "volcano-text": {"kind": "volcano", "train": "volcano-train.json", "modality": "text", "test_share": 0},
    "alpaca": {"kind": "alpaca", "train": "alpaca.parquet#50", "modality": "text"},
    "alpaca-json": {"kind": "alpaca", "train": "alpaca.json", "modality": "text", "system_prompt": "Be brief."},
    "messages": {"kind": "messages", "train": "messages.jsonl"},
    "completion": {"kind": "prompt_completion", "train": "completion.jsonl", "image_roots": ["pictures"]},
    "text": {"kind": "text", "train": "text.jsonl", "modality": "text", "prompt": "Say something."},
    "table": {
        "kind": "prompt_completion",
        "train": "table.csv",
        "image_roots": ["pictures"],
        "columns": {"prompt": "the question", "completion": "the answer", "image": "file"},
        "max_reject_share": 0.2,
    },
    "parquet": {"kind": "messages", "train": "messages.parquet", "test": "messages-test.parquet", "modality": "text"},
    "val": {
        "kind": "prompt_completion",
        "train": "completion.jsonl",
        "val": "completion-val.jsonl",
        "image_roots": ["pictures"],
        "train_on": "last",
    },
    "fire-texts": {"kind": "fire", "train": "fire.json", "skip_images": True, "sources": ["gqa"], "max_samples": 20},
}
MIX = {"volcano-all": "200%", "val": "all", "messages": "10 rows"}
"""A mixture: two data sets have some pictures in common, and one has none."""


def two(number: int, key: str = "conversations") -> dict[str, Any]:
    if key == "messages":
        spoken = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    else:
        spoken = [{"from": "human", "value": f"q{number}\n<image>"}, {"from": "gpt", "value": f"a{number}"}]
    return {"id": str(number), key: spoken}


def write_raw_files(folder: Path) -> None:
    for number, name in enumerate(PICTURES):
        write_picture(folder / "pictures" / name, (number * 8, 90, 40))
    volcano = [two(number) | {"image": name} for number, name in enumerate(PICTURES)]
    volcano += [two(number + 100) for number in range(20)]
    for row in volcano[30:]:
        row["conversations"][0]["value"] = row["conversations"][0]["value"].removesuffix("\n<image>")
    volcano[5]["conversations"].append({"from": "human", "value": "and nobody answers"})
    volcano[7]["conversations"][0]["from"] = "narrator"
    write_array(folder / "volcano-train.json", volcano)
    alpaca = [
        {"instruction": f"do {n}", "input": f"with {n}" if n % 2 else "", "output": f"done {n}", "text": "x"}
        for n in range(60)
    ]
    write_array(folder / "alpaca.json", alpaca)
    nobody_asked = pa.array([n * 10**12 for n in range(60)], pa.timestamp("us", "Mars/Phobos"))
    made = pa.Table.from_pylist(alpaca).append_column("made", nobody_asked)
    pq.write_table(made, folder / "alpaca.parquet", row_group_size=7)
    lines(folder / "messages.jsonl", [two(number, "messages") for number in range(40)])
    lines(
        folder / "completion.jsonl",
        [{"prompt": f"q{n}", "completion": f"a{n}", "images": [name]} for n, name in enumerate(PICTURES)],
    )
    own = [f"gqa/images/{number}.png" for number in range(30, 36)]
    for name in own:
        write_picture(folder / "pictures" / name, (10, 20, 7 * len(name) + own.index(name)))
    shared = {"prompt": "shared", "completion": "a", "images": [PICTURES[0]]}
    lines(folder / "completion-val.jsonl", [*({"prompt": "q", "completion": "a", "images": [x]} for x in own), shared])
    lines(folder / "text.jsonl", [{"text": f"text {number}"} for number in range(60)])
    with (folder / "table.csv").open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "the question", "the answer", "more"])
        rows.writerows([name, f'q{n}, "quoted"\nsecond line', f"a{n}", "x"] for n, name in enumerate(PICTURES))
        rows.writerow(["only", "three", "fields"])
    for name, first in (("messages", 0), ("messages-test", 500)):
        made = pa.Table.from_pylist([two(number, "messages") for number in range(first, first + 40)])
        pq.write_table(made, folder / f"{name}.parquet")
    write_array(
        folder / "fire.json",
        [fire_row(name, f"q{n}", source=("gqa", "vg")[n % 2]) for n, name in enumerate(PICTURES * 2)],
    )


def lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def snakemake(folder: Path, *words: str, more: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    files = ["--configfile", str(folder / "mine.yaml"), *more, "--cores", "2", "--"]
    return called([*call, *files, *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_raw_files(folder)
    datasets = {name: {"image_roots": [], "test": None} | block for name, block in DATASETS.items()}
    datasets["blend"] = {"mix": MIX}
    (folder / "mine.yaml").write_text(yaml.safe_dump({"datasets": datasets}, sort_keys=False))
    ran = snakemake(folder, *[f"data/{name}/stats.json" for name in [*DATASETS, "blend"]])
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    return folder


def rows_of(folder: Path, dataset: str, *splits: str) -> list[dict[str, Any]]:
    files = [folder / "data" / dataset / f"{split}.jsonl" for split in splits or ("train", "val", "test")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def stats_of(folder: Path, dataset: str) -> dict[str, Any]:
    return json.loads((folder / "data" / dataset / "stats.json").read_text())


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_in_are_rows_kept_and_rejects_and_every_row_fits_the_schema(done: Path, dataset: str) -> None:
    stats = stats_of(done, dataset)
    for split in ("train", "val", "test"):
        if split in stats:
            counts = stats[split]
            assert counts["rows_in"] == counts["kept"] + sum(counts["rejected"].values())
    validator = jsonschema.Draft202012Validator(json_schema())
    rows = rows_of(done, dataset)
    for row in rows:
        validator.validate(row)
    assert (
        len(rows)
        == sum(stats["examples"].values())
        == sum(stats[s]["kept"] for s in ("train", "val", "test") if s in stats)
    )
    have_pictures = "image_roots" in DATASETS[dataset] or dataset == "fire-texts"
    assert {len(row["images"]) for row in rows} == ({0, 1} if dataset == "volcano-all" else {int(have_pictures)})
    for row in rows:
        assert sum(turn["value"].count("<image>") for turn in row["conversations"]) == len(row["images"])


def test_volcano_gives_rows_with_and_without_pictures_together_or_apart(done: Path) -> None:
    """Apart, each side counts the other as left out."""
    assert stats_of(done, "volcano-all")["train"] == {"rows_in": 50, "kept": 49, "rejected": {"wrong_role": 1}}
    for split in ("train", "val", "test"):
        both = {len(row["images"]) for row in rows_of(done, "volcano-all", split)}
        assert both == {0, 1} if split == "train" else both <= {0, 1}
    assert stats_of(done, "volcano")["train"] == {
        "rows_in": 50,
        "kept": 29,
        "rejected": {"text_only": 20, "wrong_role": 1},
    }
    assert stats_of(done, "volcano-text")["train"] == {"rows_in": 50, "kept": 20, "rejected": {"has_picture": 30}}
    row = next(row for row in rows_of(done, "volcano") if row["images"] == [PICTURES[5]])
    assert row["conversations"] == [{"from": "human", "value": "<image>\nq5"}, {"from": "gpt", "value": "a5"}]
    assert row["source"] == "gqa"
    parts = [{row["images"][0] for row in rows_of(done, "volcano", split)} for split in ("train", "val", "test")]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert len(parts[2]) >= 5
    quarantine = (done / "data" / "volcano" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in quarantine] == ["wrong_role"]


def test_a_validation_file_is_read_with_its_pictures(done: Path) -> None:
    """The stages of a run check the pictures of both files; a train row with one of the validation file is out."""
    settings = check_config(
        {
            "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
            "datasets": {"val": DATASETS["val"]},
            "runs": {"r": {"model": "m", "dataset": "val"}},
        },
        [],
    )
    manifests = RuleInputs(None, settings).train_pictures(SimpleNamespace(run="r"))
    data = done / "data" / "val"
    files = (data / "train.jsonl", data / "val.jsonl", data / "stats.json", done / "stores" / "pictures")
    read = validated_data(*files, [done / manifest for manifest in manifests])
    assert read.loss_scale == "last_round"
    stats = stats_of(done, "val")
    assert stats["val"]["kept"] + stats["val"]["rejected"].get("in_test_split", 0) == 7
    assert sum(stats["train"]["rejected"].values()) == 1


def test_a_mixture_is_a_data_set_that_a_run_can_train_on(done: Path) -> None:
    """No picture, and no prompt, that any of its data sets holds out is in train; its pictures are those of theirs."""
    settings = check_config(
        {
            "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
            "datasets": {name: DATASETS[name] for name in MIX} | {"blend": {"mix": MIX}},
            "runs": {"r": {"model": "m", "dataset": "blend"}},
        },
        [],
    )
    manifests = RuleInputs(None, settings).train_pictures(SimpleNamespace(run="r"))
    data = done / "data" / "blend"
    files = (data / "train.jsonl", data / "val.jsonl", data / "stats.json", done / "stores" / "pictures")
    assert validated_data(*files, [done / manifest for manifest in manifests]).loss_scale == "default"

    def held(dataset: str, *splits: str) -> set[str]:
        return {(row["images"] or [row["conversations"][0]["value"]])[0] for row in rows_of(done, dataset, *splits)}

    out = set.union(*(held(name, "val", "test") for name in MIX))
    train = rows_of(done, "blend", "train")
    assert train
    assert not {name.partition("/")[2] or name for name in held("blend", "train")} & out
    stats = stats_of(done, "blend")
    assert all(one["rows_in"] == one["kept"] + sum(one["rejected"].values()) for one in (stats["train"], stats["val"]))
    assert stats["train"]["rows_in"] == sum(stats_of(done, name)["examples"]["train"] for name in MIX)
    assert stats["members"]["messages"]["train"]["kept"] == 10
    assert stats["members"]["volcano-all"]["examples"]["train"] == 2 * stats["members"]["volcano-all"]["train"]["kept"]
    assert stats["train"]["rejected"].keys() == {"in_test_split", "in_val_split", "not_drawn"}
    assert len(rows_of(done, "blend", "test")) == sum(len(rows_of(done, name, "test")) for name in MIX)
    validator = jsonschema.Draft202012Validator(json_schema())
    rows = rows_of(done, "blend")
    for row in rows:
        validator.validate(row)
    assert len({row["id"] for row in rows}) == len(rows) == sum(stats["examples"].values())


def test_another_share_makes_the_mixture_alone_stale(done: Path) -> None:
    for amount, planned in (("10 rows", set()), ("11 rows", {"mix_rows"})):
        mix = {"datasets": {"blend": {"mix": {"messages": amount}}}}
        (done / "more.yaml").write_text(yaml.safe_dump(mix))
        ran = snakemake(done, "data/blend/stats.json", more=[str(done / "more.yaml"), "-n"])
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert set(re.findall(r"^(\w+) +\d+$", ran.stdout, re.MULTILINE)) == ({*planned, "total"} if planned else set())


def test_data_sets_have_their_pages(done: Path) -> None:
    """With, without and with skipped pictures; with a test file, a share, and neither; mixed."""
    names = ["volcano", "volcano-text", "text", "alpaca-json", "fire-texts", "blend"]
    made = snakemake(done, *(f"reports/data-{name}.html" for name in names))
    assert made.returncode == 0, (made.stdout + made.stderr)[-6000:]
    pages = {name: (done / "reports" / f"data-{name}.html").read_text() for name in names}
    assert "mixture of volcano-all (200%), val (all), messages (10 rows)" in pages["blend"]
    assert '<td data-head="takes">10 rows</td>' in pages["blend"]
    assert "rows of kind volcano, made from volcano-train.json" in pages["volcano"]
    assert "30 not requested, left out" in pages["volcano-text"]
    assert "rows: no raw test split, and test_share is 0" in pages["volcano-text"]
    assert [name for name in pages if "test_share is 0" in pages[name]] == ["volcano-text"]
    assert 'id="near"' not in pages["volcano-text"]  # it has no test rows
    assert "No train picture looks like one in the test split" in pages["volcano"]
    assert "what a test row asks: 0. No pictures were compared." in pages["text"]
    assert "Be brief." in pages["alpaca-json"]
    assert not (done / "images" / "text").exists()
    assert 'src="data:' not in pages["fire-texts"]
    assert set(speeds(done, "data_page").values()) == {"rows", "pictures"}


def test_a_test_share_of_0_gives_an_empty_file(done: Path) -> None:
    assert (done / "data" / "volcano-text" / "test.jsonl").read_bytes() == b""
    assert "test.jsonl is empty" in (done / "logs" / "validate_sharegpt" / "volcano-text.log").read_text()


def test_a_number_after_the_address_draws_rows(done: Path) -> None:
    assert stats_of(done, "alpaca")["train"] == {"rows_in": 60, "kept": 50, "rejected": {"not_sampled": 10}}
    texts = {row["conversations"][0]["value"] for row in rows_of(done, "alpaca")}
    assert texts <= {f"do {n}\nwith {n}" if n % 2 else f"do {n}" for n in range(60)}
    system = {"from": "system", "value": "Be brief."}
    assert all(row["conversations"][0] == system for row in rows_of(done, "alpaca-json"))


def test_a_table_is_read_by_its_columns(done: Path) -> None:
    stats = stats_of(done, "table")
    assert stats["train"] == {"rows_in": 31, "kept": 30, "rejected": {"bad_table_row": 1}}
    (bad,) = map(json.loads, (done / "data" / "table" / "quarantine.jsonl").read_text().splitlines())
    raw = (done / "raw" / "table" / "table.csv").read_bytes()
    assert raw[bad["start"] : bad["end"]] == b"only,three,fields\r\n"
    assert bad["detail"] == "3 fields, the header has 4"
    row = next(row for row in rows_of(done, "table") if row["images"] == [PICTURES[3]])
    assert row["conversations"][0]["value"] == '<image>\nq3, "quoted"\nsecond line'


def test_rows_with_skipped_pictures_are_never_trained_on(done: Path) -> None:
    """With skip_images there is no manifest, rows keep their names, and training refuses them."""
    stats = stats_of(done, "fire-texts")
    assert stats["skip_images"] is True
    assert not (done / "images" / "fire-texts").exists()
    assert stats["train"]["rejected"] == {"not_sampled": 10, "source_left_out": 30}
    assert {row["images"][0] for row in rows_of(done, "fire-texts")} <= set(PICTURES)
    from vlmflow.core.errors import VlmflowError
    from vlmflow.rows.training_data import validated_data

    data = done / "data" / "fire-texts"
    with pytest.raises(VlmflowError, match="never checked"):
        validated_data(data / "train.jsonl", data / "val.jsonl", data / "stats.json", done / "stores" / "pictures")


def test_every_stage_reports_its_speed(done: Path) -> None:
    """Rows, pictures or bytes per second. For the later stages see test_fetch_images.py and test_lengths.py."""
    logs = list((done / "logs").rglob("*.log"))
    stages = {log.parent.name for log in logs}
    assert stages >= {"fetch_rows", "resolve_images", "convert_rows", "validate_sharegpt"}
    assert all(SPEED.search(log.read_text()) for log in logs)
    checking = {what: unit for what, unit in speeds(done, "validate_sharegpt").items() if "DEBUG checking" in what}
    assert len(checking) > len(DATASETS)
    assert set(checking.values()) == {"rows"}


def test_a_fixed_row_replaces_the_raw_row(done: Path) -> None:
    """An edited copy of the quarantine, named in the configuration: only that data set runs again."""
    quarantine = (done / "data" / "volcano" / "quarantine.jsonl").read_text()
    (done / "fixed.jsonl").write_text(quarantine.replace('"narrator"', '"human"'))
    config = yaml.safe_load((done / "mine.yaml").read_text())
    config["datasets"]["volcano"]["fixed_rows"] = str(done / "fixed.jsonl")
    (done / "mine.yaml").write_text(yaml.safe_dump(config))
    ran = snakemake(done, *[f"data/{name}/stats.json" for name in DATASETS])
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert "fetch_rows" not in ran.stdout + ran.stderr
    stats = stats_of(done, "volcano")
    assert stats["train"]["kept"] == 30
    assert [file["file"] for file in stats["mended"]] == [str(done / "fixed.jsonl")]
    assert stats["mended_rows"] == {"train": 1}
    assert (done / "data" / "volcano" / "quarantine.jsonl").read_bytes() == b""
