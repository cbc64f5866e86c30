"""The index of a working directory, as a browser shows it."""

import json
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec
import pytest

from browser import Browser
from made_accounts import (
    LENGTHS,
    leave_training,
    some_answers,
    some_checks,
    some_evaluation,
    some_fitted,
    some_gate,
    some_provenance,
    some_report,
    some_stats,
)
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import EvaluatedModel, Interval
from vlmflow.fetch.placed import ModelManifest
from vlmflow.lengths.summary import LengthSummary, MaxLengths, MeasuredFiles
from vlmflow.merging.proof import Proof, proven_digest
from vlmflow.reports.overview import index_page
from vlmflow.reports.overview import write_index as main
from vlmflow.supervisor.report import Check

HOSTILE = "<script>document.title='taken'</script>"

ACCOUNTS = {
    "data": "data/fire/stats.json",
    "lengths": "lengths/mine/summary.json",
    "gate": "checkpoints/mine/smoke/gate.json",
    "full run": "checkpoints/mine/full/report.json",
    "verification": "verified/mine/proof.json",
    "evaluation": "eval/mine/val/report.json",
    "answers": "answers/mine/val/report.json",
}
"""The file behind each column."""


THREE_OF_5 = Interval(0.6, 0.5, 0.7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with all accounts and pages of the run `mine`, and the begun run `other`."""
    where = tmp_path / "a folder"
    write_account(where / "data/fire/stats.json", some_stats(examples={"train": 1_234, "val": 5, "test": 6}))
    summary = LengthSummary(LENGTHS, LENGTHS, MaxLengths(64, 64), 64, {}, 3, MeasuredFiles({}, {}, {}))
    write_account(where / "lengths/mine/summary.json", summary)
    fitted = some_fitted()
    write_account(where / "fitted/mine/account.json", fitted)
    write_account(where / "checkpoints/mine/smoke/gate.json", some_gate())
    write_account(where / "checkpoints/mine/full/report.json", some_report(seconds=7_384.0))
    proof = Proof(some_checks(), {}, None, {})
    write_account(where / "verified/mine/proof.json", proof)
    evaluation = some_evaluation(rows=7, tuned=EvaluatedModel(proven_digest(proof)))
    write_account(where / "eval/mine/val/report.json", evaluation)
    on_test = msgspec.structs.replace(evaluation, split="test", verdict=HOSTILE, looks=3, costs_first_answers=True)
    write_account(where / "eval/mine/test/report.json", on_test)
    asked = some_answers()
    asked = msgspec.structs.replace(asked, tuned=msgspec.structs.replace(asked.tuned, digest=proven_digest(proof)))
    later = msgspec.structs.replace(asked.all[1], tuned=msgspec.structs.replace(asked.all[1].tuned, right=THREE_OF_5))
    write_account(where / "answers/mine/val/report.json", msgspec.structs.replace(asked, all=[asked.all[0], later]))
    pages = [f"reports/{name}.html" for name in ("data-fire", "lengths-mine", "estimate-mine", "run-mine", "eval-mine")]
    for page in [*pages, "checkpoints/mine/smoke/gate.html", "merged/mine/README.md", "data/fire/counts.html"]:
        (where / page).parent.mkdir(parents=True, exist_ok=True)
        (where / page).write_text("a page")
    write_account(where / "fitted/other/account.json", fitted)
    (where / "fitted/half.part").mkdir()
    (where / "fitted/.hidden").mkdir()
    return where


def page_of(folder: Path) -> str:
    return index_page(folder, folder / "stores/runs", folder / "reports/index.html", {}, "noon")[0]


def test_a_browser_shows_every_run_and_its_pages(folder: Path, tmp_path: Path) -> None:
    page = main([], folder)
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(page, "a folder: 2 runs")
        browser.open(page)
        cells = browser.evaluate("[...document.querySelectorAll('#mine > *')].map(cell => cell.innerText)")
        links = browser.evaluate("[...document.links].map(link => link.href)")
        other = browser.evaluate("document.querySelector('#other').innerText")
        browser.screenshot(tmp_path / "page.png")
    shown = dict(zip(["run", *ACCOUNTS], cells, strict=True))
    assert shown["run"] == "mine"
    assert "rows: 1,234 train, 5 val, 6 test" in shown["data"]
    assert "median 10, longest 20 tokens\nmax_length 512; 4 left out" in shown["lengths"]
    assert "gate open" in shown["gate"]
    assert "8 steps\nloss 2.000\nvalidation loss 2.000, at step 8" in shown["full run"]
    assert "time 2:03:04, on 4 CPU processes" in shown["full run"]
    assert "proven\n9 tensors\nlogits not compared" in shown["verification"]
    costs = "costs first answers"
    assert f"learned\nval: learned, 7 rows\ntest: {HOSTILE}, 7 rows, {costs}, look 3" in shown["evaluation"]
    said = "tuned 40.0% → 60.0% right\nbase 40.0% → 40.0%\nval, at first, and after feedback; 15 rows"
    assert shown["answers"] == said
    assert "fire" in other
    assert "not asked" in other
    assert "not evaluated" in other
    places = [Path(unquote(urlparse(link).path)) for link in links]
    assert len(places) == 8 + 2, "both runs have the data set's pages"
    assert all(place.is_file() and place.is_relative_to(folder) for place in places)
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.parametrize("damage", ["half", "empty", "list", "no number", "endless", "folder", "link to itself"])
@pytest.mark.parametrize("column", ACCOUNTS)
def test_a_damaged_file_is_one_line_of_its_run(folder: Path, column: str, damage: str) -> None:
    file = folder / ACCOUNTS[column]
    content = file.read_text()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "link to itself":
        file.symlink_to(file)
    else:
        changed = {
            "half": content[: len(content) // 2],
            "empty": "",
            "list": "[]",
            "no number": "\N{NULL}\x1b[31m" + content,
            "endless": "[" * 100_000,
        }
        file.write_text(changed[damage])
    write_account(folder / "checkpoints/other/full/report.json", some_report(steps=77))
    page = page_of(folder)
    faults = page.count("cannot be read")
    if damage in ("folder", "link to itself"):  # neither is a file, so this stage has made nothing yet
        assert faults <= 1
    else:
        # Both runs have the same data set.
        assert faults == (2 if column == "data" else 1)
        assert f'<span class="badge bad">{column}</span>\ncannot be read: {file}' in page
    assert "77 steps" in page
    assert page.endswith("</html>\n")


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("fitted/mine/account.json", "dataset", "../../secret"),
        ("eval/mine/val/report.json", "verdict", None),
        ("checkpoints/mine/full/report.json", "seconds", 10**400),
        ("checkpoints/mine/full/report.json", "losses", [[1]]),
    ],
)
def test_a_value_that_no_stage_writes_is_one_line(folder: Path, path: str, key: str, value: object) -> None:
    (folder.parent / "secret").mkdir()
    account = json.loads((folder / path).read_text())
    (folder / path).write_text(json.dumps(account | {key: value}))
    page = page_of(folder)
    assert page.count("cannot be read: ") == 1
    assert "secret/" not in page


def test_what_no_page_can_hold_is_replaced(folder: Path) -> None:
    file = folder / "eval/mine/val/report.json"
    file.write_text(file.read_text().replace('"verdict": "learned"', '"verdict": "\\ud800<b>\\u001b[31m"'))
    write_account(folder / "data/fire/stats.json", some_stats(examples={"train": 1}))
    stats = folder / "data/fire/stats.json"
    stats.write_text(stats.read_text().replace('"examples": {\n  "train"', '"examples": {\n  "\\udfff"'))
    page = main([], folder).read_text()
    assert "�&lt;b&gt;�[31m" in page
    assert "rows: 1 �<" in page


def test_a_closed_gate_is_read_from_its_run_folder(folder: Path) -> None:
    """The stage fails, so it leaves no target."""
    (folder / "checkpoints/mine/smoke/gate.json").unlink()
    checks = [Check("memory fits", False, ""), Check("loss is finite", True, "")]
    closed = msgspec.structs.replace(some_gate(), passed=False, checks=checks)
    write_account(folder / "stores/runs/mine/smoke/abc/gate.json", closed)
    page = page_of(folder)
    assert '<span class="badge bad">gate closed</span>' in page
    assert "failed: memory fits<" in page


def test_a_run_of_the_configuration_is_listed_before_it_begins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my-run.yaml").write_text("runs: {planned: {model: qwen3-8b, dataset: alpaca}}")
    page = main([tmp_path / "my-run.yaml"], folder).read_text()
    assert "a folder: 3 runs" in page
    assert 'id="planned"' in page
    assert "alpaca" in page
    assert "qwen3vl-volcano" not in page, "it is in config.yaml, which everybody has"
    with pytest.raises(VlmflowError, match="is not a folder"):
        main([], tmp_path / "nowhere")


def test_a_training_that_is_not_finished_has_its_live_page(folder: Path) -> None:
    (folder / "checkpoints/mine/full/report.json").unlink()
    live = folder / "stores/runs/mine/full/abc/run.html"
    live.parent.mkdir(parents=True)
    live.touch()
    page = page_of(folder)
    assert "training not finished" in page
    assert 'href="../stores/runs/mine/full/abc/run.html"' in page


def test_an_evaluation_of_other_weights_says_nothing_about_these(folder: Path) -> None:
    write_account(folder / "eval/mine/test/report.json", some_evaluation(split="test"))
    page = page_of(folder)
    assert '<span class="badge bad">of other weights</span>' in page
    assert "val: learned" not in page


def test_without_a_proof_the_provenance_tells_which_weights_they_are(folder: Path) -> None:
    (folder / "verified/mine/proof.json").unlink()
    write_account(folder / "merged/mine/provenance.json", some_provenance())
    assert "of other weights" not in page_of(folder)
    write_account(folder / "merged/mine/provenance.json", some_provenance(merged={"a.safetensors": "other"}))
    assert page_of(folder).count("of other weights") == 2


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    assert "There is no run here yet" in page_of(tmp_path)


@pytest.mark.parametrize(
    ("verdict", "costs", "colour"),
    [
        ("learned", False, "good"),
        ("learned", True, "maybe"),
        ("no gain shown", False, "maybe"),
        ("too few rows", False, "maybe"),
        ("worse", False, "bad"),
    ],
)
def test_a_verdict_has_its_colour(folder: Path, verdict: str, costs: bool, colour: str) -> None:
    file = folder / "eval/mine/val/report.json"
    account = json.loads(file.read_text())
    file.write_text(json.dumps(account | {"verdict": verdict, "costs_first_answers": costs}))
    assert f'<span class="badge {colour}">{verdict}</span>' in page_of(folder)


def test_a_run_names_its_model_its_own_settings_and_its_former_trainings(folder: Path, tmp_path: Path) -> None:
    """Else a person who trained three times sees the last one, and not what it was."""
    manifest = ModelManifest("tiny", HOSTILE, None, folder, {}, [], "model")
    write_account(folder / "models/tiny/manifest.json", manifest)
    leave_training(folder / "stores/runs/mine/full", "1" * 16, [], learning_rate=2e-4)
    page = main([], folder)
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(page, "a folder: 2 runs")
        browser.open(page)
        told = browser.evaluate("document.querySelector('#mine + tr').innerText")
    assert told == (
        f"model {HOSTILE}\nsettings: device cpu, processes 4\n"
        f"Former trainings, in {folder}/stores/runs/mine/full:\n"
        f"{'1' * 16} train.learning_rate 0.0002 (now 0.0001); no step was made"
    )


def test_a_planned_run_names_what_it_will_be_trained_from(folder: Path, tmp_path: Path) -> None:
    overlay = "runs: {planned: {model: qwen3-8b, dataset: alpaca, tuner: full, train: {seed: 7}}}"
    (tmp_path / "my-run.yaml").write_text(overlay)
    row = main([tmp_path / "my-run.yaml"], folder).read_text().partition('id="planned"')[2]
    assert "model hf://Qwen/Qwen3-8B<" in row
    assert "settings: tuner full, train.seed 7, train.swift_args.template qwen3<" in row
