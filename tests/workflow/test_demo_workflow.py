"""From the sample to verified merged weights, on the real rules."""

import base64
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from browser import Browser
from executed_notebook import executed
from stages.run_page import main as draw_page
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.in_trainer.messages import Begin, as_line, read_events
from vlmflow.lengths.summary import FittedRows, LengthSummary
from vlmflow.merging.proof import Proof
from vlmflow.reports.overview import index_page
from vlmflow.reports.provenance import Provenance
from vlmflow.rows.chat import HARMLESS, LEFT_OUT
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport
from workflow_runs import RUN, STEPS, copy_folder, snakemake, stale_rules, vlmflow


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_raw_row_is_accounted_for(demo_run: Path) -> None:
    """Rows in = kept + rejected, per raw split; the files contain what the account says."""
    stats = read(demo_run / "data" / "fire" / "stats.json")
    for split, rows in (("train", 240), ("test", 48)):
        counts = stats[split]
        assert counts["rows_in"] == rows == counts["kept"] + sum(counts["rejected"].values())
    files = {name: len(lines(demo_run / "data" / "fire" / f"{name}.jsonl")) for name in ("train", "val", "test")}
    assert files == stats["examples"]
    assert files["train"] + files["val"] == stats["train"]["kept"]
    assert files["test"] == stats["test"]["kept"]
    assert min(files.values()) > 0


def test_every_fault_of_the_sample_ends_as_it_should(demo_run: Path) -> None:
    """The quarantine contains exactly the rows whose fault must be rejected."""
    faults = read(demo_run / "sample" / "faults.json")
    expected = {(fault["split"], fault["row"]) for fault in faults if fault["expected"] == "rejected"}
    quarantine = lines(demo_run / "data" / "fire" / "quarantine.jsonl")
    assert {(row["split"], row["row"]) for row in quarantine} == expected
    elsewhere = {"near_test_picture", "near_test_question", "in_val_split"}  # drop is off, and val has no file
    assert {row["reason"] for row in quarantine} >= HARMLESS - LEFT_OUT - elsewhere


def test_no_picture_is_in_two_splits(demo_run: Path) -> None:
    """By the bytes of the pictures, not their names; val too is drawn by picture."""
    digests = {
        split: {
            hashlib.sha256((demo_run / "stores" / "pictures" / "fire" / row["images"][0]).read_bytes()).digest()
            for row in lines(demo_run / "data" / "fire" / f"{split}.jsonl")
        }
        for split in ("train", "val", "test")
    }
    assert not digests["train"] & digests["val"]
    assert not digests["train"] & digests["test"]
    assert not digests["val"] & digests["test"]


def test_every_row_was_measured_and_the_longest_are_reported(demo_run: Path) -> None:
    """Lengths of all rows before training; the longest are named; page, gate and model card agree."""
    lengths = {split: lines(demo_run / "lengths" / RUN / f"{split}.jsonl") for split in ("train", "val")}
    for split, rows in lengths.items():
        assert [row["id"] for row in rows] == [
            row["id"] for row in lines(demo_run / "data" / "fire" / f"{split}.jsonl")
        ]
        assert [row["id"] for row in rows] == [row["id"] for row in lines(demo_run / "fitted" / RUN / f"{split}.jsonl")]
    summary = read(demo_run / "lengths" / RUN / "summary.json")
    by_length = sorted(lengths["train"], key=lambda row: -row["text_tokens"] - row["picture_tokens"])
    longest = [row["id"] for row in summary["train"]["longest"]]
    assert longest == [row["id"] for row in by_length[: len(longest)]]
    gate = read(demo_run / "checkpoints" / RUN / "smoke" / "gate.json")
    assert gate["lengths"] == summary["train"]
    assert longest[0] in (demo_run / "checkpoints" / RUN / "smoke" / "gate.html").read_text()
    card = (demo_run / "merged" / RUN / "README.md").read_text()
    assert (
        f"Training rows: {len(by_length)} train, {len(lengths['val'])} val; of the over-long ones 0 were left" in card
    )
    assert f"{summary['train']['tokens']:,} tokens" in card


def test_the_gate_is_open_with_its_figures(demo_run: Path) -> None:
    gate = read(demo_run / "checkpoints" / RUN / "smoke" / "gate.json")
    assert gate["passed"]
    assert gate["tokens_per_second"] > 0
    assert all(peak > 100_000_000 for peak in gate["peak_memory"])
    assert len(gate["peak_memory"]) == 2
    assert gate["full_run"]["steps"] == STEPS
    assert gate["full_run"]["seconds"] > 0


def test_training_was_distributed_and_the_validation_loss_fell(demo_run: Path) -> None:
    report = read(demo_run / "checkpoints" / RUN / "full" / "report.json")
    assert (report["world_size"], report["parallel_mode"], report["steps"]) == (2, "DISTRIBUTED", STEPS)
    evals = dict(report["eval_losses"])
    assert sorted(evals) == [3, 6, 9]
    assert evals[9] < evals[3] < report["losses"][0][1]
    assert report["best"]["eval_loss"] == pytest.approx(min(evals.values()))
    assert report["tokens"] > STEPS * 2 * 50


def test_the_trainers_log_has_no_row(demo_run: Path) -> None:
    """ms-swift prints one; its words could look like the cause of a failure."""
    logs = list((demo_run / "stores" / "runs" / RUN).glob("*/*/trainer.log"))
    assert len(logs) == 2
    assert not [log for log in logs if "[INPUT" in log.read_text() or "<|im_start|>user" in log.read_text()]


def test_rows_shows_what_was_in_a_step(demo_run: Path) -> None:
    """The tokens of all steps are those that the trainers counted, so no row is another one."""
    report = json.loads((demo_run / "checkpoints" / RUN / "full" / "report.json").read_text())
    call = vlmflow("rows", RUN, "--directory", demo_run)
    tokens = 0
    for step in range(1, STEPS + 1):
        done = subprocess.run([*call, "--step", str(step)], capture_output=True, text=True, check=True)
        head, columns, *rows = done.stdout.splitlines()
        assert columns.split()[:4] == ["rank", "pass", "id", "tokens"]
        assert {row.split()[0] for row in rows} == {"0", "1"}
        tokens += int(head.split(", ")[-1].removesuffix(" tokens").replace(",", ""))
    assert tokens == report["tokens"]
    done = subprocess.run([*call, "--step", str(STEPS + 1)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"step {STEPS + 1} has not begun; the last step that began is {STEPS}" in done.stderr


def test_the_notebook_and_the_index_show_the_run(demo_run: Path) -> None:
    said = executed(demo_run, RUN)
    assert "raw train: 240 rows = " in said
    assert f"{STEPS} of {STEPS} steps" in said
    assert "titles: ['rejected and left out, by reason', '', '']" in said
    page, runs = index_page(demo_run, demo_run / "stores/runs", demo_run / "reports/index.html", {}, "noon")
    assert runs == 1
    assert "cannot be read" not in page
    assert f'<div class="small">{STEPS} steps</div>' in page
    assert 'href="../checkpoints/qwen3vl-fire/smoke/gate.html"' in page


def test_merged_weights_load_offline_and_know_where_they_come_from(demo_run: Path) -> None:
    """Plain transformers loads them; provenance has the digests of every input."""
    merged = demo_run / "merged" / RUN
    AutoProcessor.from_pretrained(merged, local_files_only=True)
    AutoModelForImageTextToText.from_pretrained(merged, local_files_only=True)
    facts = read(merged / "provenance.json")
    assert facts["data"]["raw"]["train"][0]["sha256"] == sha256_of(demo_run / "sample" / "FIRE-train-100K.json")
    assert facts["data"]["digests"]["train.jsonl"] == sha256_of(demo_run / "data" / "fire" / "train.jsonl")
    assert facts["base_model"]["files"]["config.json"] == sha256_of(demo_run / "tiny-model" / "config.json")
    adapter = demo_run / "checkpoints" / RUN / "full" / "adapter_model.safetensors"
    assert facts["training"]["digests"]["released"][adapter.name] == sha256_of(adapter)
    assert {name: sha256_of(merged / name) for name in facts["merged"]} == facts["merged"]
    assert {"config.json", "tokenizer.json", "preprocessor_config.json"} < facts["merged"].keys()
    assert facts["verification"]["logits"] is not None
    assert (merged / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert not (demo_run / "work" / RUN / "merged").exists()


def test_published_weights_are_the_proven_ones_and_take_no_more_disk(demo_run: Path) -> None:
    verified, merged = demo_run / "verified" / RUN, demo_run / "merged" / RUN
    proof = read(verified / "proof.json")
    weights = {name for name in proof["files"] if name.endswith(".safetensors")}
    assert weights
    assert all((verified / name).samefile(merged / name) for name in weights)
    names = {file.name for file in merged.iterdir()} - {".snakemake_timestamp"}
    assert names == {*proof["files"], "README.md", "provenance.json"}


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("data/fire/stats.json", Stats),
        (f"lengths/{RUN}/summary.json", LengthSummary),
        (f"fitted/{RUN}/account.json", FittedRows),
        (f"checkpoints/{RUN}/smoke/gate.json", Gate),
        (f"checkpoints/{RUN}/smoke/report.json", TrainingReport),
        (f"checkpoints/{RUN}/full/report.json", TrainingReport),
        (f"verified/{RUN}/proof.json", Proof),
        (f"merged/{RUN}/provenance.json", Provenance),
    ],
)
def test_the_type_of_an_account_has_all_its_keys(demo_run: Path, tmp_path: Path, file: str, kind: type) -> None:
    """Keys without a field would be lost on the way to the model card; those out of order would be other bytes."""
    write_account(tmp_path / "again.json", read_account(demo_run / file, kind))
    assert (tmp_path / "again.json").read_bytes() == (demo_run / file).read_bytes()


def test_the_trainers_report_is_read_as_it_was_written(demo_run: Path) -> None:
    progress = list((demo_run / "stores" / "runs" / RUN).glob("*/*/progress.jsonl"))
    assert len(progress) == 2, "of the smoke run and of the full run"
    for file in progress:
        events = read_events(file)
        assert "".join(map(as_line, events)) == file.read_text()
        begun = [event.at for event in events if isinstance(event, Begin)]
        assert all(isinstance(at, float) and at <= file.stat().st_mtime for at in begun)


def test_the_end_of_the_run_says_where_everything_is(demo_run: Path) -> None:
    """Also that of a call which has nothing to do; a dry run, which has no end, says nothing."""
    said = (demo_run / "said.txt").read_text()
    assert said.count(f"\n{RUN} is done.\n") == 1
    end = said[said.index(f"{RUN} is done.") : said.index("origin: provenance.json)")]
    places = [word.rstrip(";") for word in end.split() if str(demo_run)[1:] in word]
    assert len(places) == 4, "no page was asked for"
    assert not [place for place in places if not Path("/", place).exists()]
    assert end in snakemake(demo_run, f"merged/{RUN}")
    assert "is done." not in snakemake(demo_run, "-n", f"merged/{RUN}")


def test_a_second_run_has_nothing_to_do(demo_run: Path) -> None:
    assert stale_rules(demo_run) == set()


def test_the_report_holds_counts_curve_and_gate(demo_run: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    snakemake(demo_run, "--report", str(report), f"merged/{RUN}")
    text = report.read_text()
    results = {
        "data/fire/counts.html",
        f"checkpoints/{RUN}/smoke/gate.html",
        f"checkpoints/{RUN}/smoke/loss.png",
        f"checkpoints/{RUN}/full/loss.png",
    }
    for result in results:
        assert base64.b64encode((demo_run / result).read_bytes()).decode() in text, result


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_rows_name_pictures_in_the_store_and_nothing_of_this_machine(demo_run: Path, name: str) -> None:
    for row in lines(demo_run / "data" / "fire" / f"{name}.jsonl"):
        picture = demo_run / "stores" / "pictures" / "fire" / row["images"][0]
        assert picture.is_file()
        assert str(demo_run) not in json.dumps(row)


def of_run(demo_run: Path) -> dict[str, Any]:
    """Return the inputs of the run's page beside its training and its estimate."""
    (model,) = (demo_run / "models").iterdir()
    return {"model": model, "dataset": "fire", "run_store": demo_run / "stores" / "runs"}


def test_the_runs_page_shows_the_course_of_the_training_beside_its_estimate(demo_run: Path, tmp_path: Path) -> None:
    """Every figure is the report's; the page that was written while it trained ended too."""
    smoke, full = (demo_run / "checkpoints" / RUN / stage for stage in ("smoke", "full"))
    estimate = demo_run / "estimates" / f"{RUN}.json"
    draw_page(smoke=smoke, full=full, estimate=estimate, page=tmp_path / "page.html", **of_run(demo_run))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(tmp_path / "page.html", f"{RUN}: full run, step {STEPS} of {STEPS}")
        text = browser.evaluate("document.body.innerText")
        titles = browser.evaluate("[...document.querySelectorAll('h3')].map(title => title.innerText)")
        cells = "[...row.children].map(cell => cell.innerText)"
        rows = browser.evaluate(f"[...document.querySelectorAll('.stack tr')].map(row => {cells})")
    assert "data set fire; settings that differ from the defaults: device: cpu, " in text
    assert {"Loss", "Learning rate", "Gradient norm", "Speed"} <= set(titles)
    gate, report = read(smoke / "gate.json"), read(full / "report.json")
    table = {name: (estimated, measured) for name, estimated, measured, _ in rows[1:]}
    assert table["optimizer steps"] == (str(gate["full_run"]["steps"]), str(report["steps"]))
    assert [name for name, *_ in rows].count("optimizer steps") == 2, "once of the gate, once of the estimate"
    assert table["tokens trained on"] == (f"{gate['full_run']['tokens']:,}", f"{report['tokens']:,}")
    for page in (demo_run / "stores" / "runs" / RUN).glob("*/*/run.html"):
        assert "<b>ended</b>" in page.read_text()
        assert 'http-equiv="refresh"' not in page.read_text()
    assert len(list((demo_run / "stores" / "runs" / RUN).glob("*/*/run.html"))) == 2


def test_other_events_than_those_of_the_report_are_refused(demo_run: Path, tmp_path: Path) -> None:
    full = copy_folder(demo_run / "checkpoints" / RUN / "full", tmp_path / "full")
    with (full / "progress.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(VlmflowError, match=r"1 of 1 files of events have changed .*: progress\.jsonl"):
        draw_page(
            smoke=demo_run / "checkpoints" / RUN / "smoke",
            full=full,
            estimate=demo_run / "estimates" / f"{RUN}.json",
            page=tmp_path / "page.html",
            **of_run(demo_run),
        )
