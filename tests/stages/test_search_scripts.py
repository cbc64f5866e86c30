"""The scripts of a search, one after the other, with results from a function: from the first trial to an overlay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from browser import Browser
from made_accounts import some_choice, some_fitted, some_gate
from made_inputs import some_inputs
from made_search import NOTHING, TRAIN, best_unjudged, result
from stages import choose_best, propose, search_page, tell
from vlmflow.config.model import check_config
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.search_settings import SearchLimits, SearchSettings, slots_of, step_before, steps_of
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.estimate.account import NoEstimate
from vlmflow.estimate.estimate import estimate
from vlmflow.reports.search_page import search_page as search_page_of
from vlmflow.search.study import Asked, Judged, Study

HOSTILE = "<script>document.title='taken'</script>"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a search reads of its run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    fitted = tmp_path / "fitted" / "r"
    fitted.mkdir(parents=True)
    lengths = fitted / "train.lengths.jsonl"
    row = {"id": "a", "start": 0, "end": 1, "text_tokens": 100, "picture_tokens": 0}
    lengths.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    write_account(fitted / "account.json", structs.replace(some_fitted(), digests={lengths.name: sha256_of(lengths)}))
    write_account(tmp_path / "estimates" / "r.json", NoEstimate("an unknown model"))
    write_account(tmp_path / "chosen" / "r" / "val" / "account.json", some_choice())
    return tmp_path


def config(**search: Any) -> dict[str, Any]:
    space = {"learning_rate": {"low": "1e-5", "high": 1e-2, "log": True}, "lora.rank": [8, "16"]}
    return {
        "models": {"m": {"source": "tiny", "model_type": "qwen3", "template": "qwen3"}},
        "datasets": {"d": {"kind": "alpaca", "modality": "text", "train": "rows.json"}},
        "runs": {"r": {"model": "m", "dataset": "d", "device": "cpu", "train": TRAIN.model_dump(exclude_unset=True)}},
        "search": {"s": {"run": "r", "space": space, "rounds": 2, "together": 3, "rungs": 2} | search},
    }


def settings(**search: Any) -> SearchSettings:
    return check_config(config(**search), []).search["s"]


OWN = {"learning_rate": 0.02, "lora.rank": 16}
"""The run's own settings; the rate is outside the space."""


def proposed(search: SearchSettings, step: tuple[int, int], planned: propose.PlanBlock | None, **files: Any) -> Path:
    """Run `propose` for a step; returns the step's folder."""
    here, before = Path("search/s") / f"{step[0]}/{step[1]}", step_before(search.rungs, *step)
    earlier = [Path("search/s") / f"{before[0]}/{before[1]}"] if before else []
    others: dict[str, Any] = {"estimate": Path("estimates/r.json"), "smoke": []} | files
    propose.main(
        rows=Path("fitted/r"),
        study=[one / "study.json" for one in earlier],
        journal=[one / "study.journal" for one in earlier],
        asked=here / "asked.json",
        asked_journal=here / "asked.journal",
        settings=search,
        run=RunSettings.model_construct(train=TRAIN, nodes=1, processes=2),
        planned=planned,
        own=None if earlier else OWN,
        chosen=Path("chosen/r/val"),
        require="eval_loss",
        **others,
    )
    return here


def whole_search(search: SearchSettings) -> tuple[Path, list[Path]]:
    """Run all steps; returns the last account of the study, and all results."""
    results: list[Path] = []
    for step in steps_of(search):
        here = proposed(search, step, None)
        asked = read_account(here / "asked.json", Asked)
        for slot, trial in enumerate(asked.trials):
            answer = NOTHING
            if trial and trial.number == 1:
                answer = result(trial, None, state="failed", reason=f"out of memory {HOSTILE}")
            elif trial:
                answer = result(trial, 1 + 1000 * trial.settings["learning_rate"])
            write_account(here / f"{slot}.json", answer)
        files = [here / f"{slot}.json" for slot in range(slots_of(search.together, *step))]
        earlier = step_before(search.rungs, *step)
        tell.main(
            asked=here / "asked.json",
            asked_journal=here / "asked.journal",
            results=files,
            before=[Path("search/s") / f"{earlier[0]}/{earlier[1]}/study.json"] if earlier else [],
            study=here / "study.json",
            journal=here / "study.journal",
            settings=search,
        )
        results += files
    return here / "study.json", results


def test_a_search_ends_in_an_overlay_that_the_run_takes_and_a_page(folder: Path) -> None:
    search = settings()
    study, results = whole_search(search)
    best, probably, judged = (Path("search/s") / name for name in ("best.yaml", "probably.yaml", "judged.json"))
    limits = search.limits
    trials = [json.loads(file.read_text()) for file in results if file.parent.name == "1"]
    lowest = min((one for one in trials if one["state"] == "done"), key=lambda one: one["value"])
    said = f"Trial {lowest['number']} beats the run's own settings (trial 0)."
    found = structs.replace(best_unjudged(read_account(study, Study), limits), study=sha256_of(study), sentence=said)
    write_account(judged, found)
    choose_best.main(study=study, judged=judged, results=results, best=best, probably=probably, settings=search)
    assert probably.read_bytes() == best.read_bytes(), "what is shown to be better is probably so"
    (folder / "mine.yaml").write_text(yaml.safe_dump(config()))
    laid_over = check_config(read_layers([folder / "mine.yaml", best]), [folder / "mine.yaml", best])
    train = laid_over.runs["r"].train
    assert (train.learning_rate, train.lora.rank) == tuple(
        lowest["settings"][key] for key in ("learning_rate", "lora.rank")
    )
    assert train.max_steps == TRAIN.max_steps
    # Whoever changes a value afterwards is told that the search did not choose it.
    (folder / "later.yaml").write_text("runs: {r: {train: {learning_rate: 0.5}}}")
    later = [folder / "mine.yaml", best, folder / "later.yaml"]
    with pytest.raises(VlmflowError, match=r"search s chose learning_rate: .* but train.learning_rate is 0.5"):
        check_config(read_layers(later), later)

    page = Path("reports/search-s.html")
    search_page.main(study=study, judged=judged, results=results, page=page, run="r", limits=limits, device="cpu")
    with Browser(folder / "profile") as browser:
        browser.check_page(folder / page, "s: search for the settings of r")
        text = browser.evaluate("document.body.innerText")
        rows = browser.evaluate("document.querySelectorAll('#trials tbody tr').length")
        first = browser.evaluate("document.querySelector('#trials tbody tr').innerText")
        lines = browser.evaluate("document.querySelectorAll('#curves svg g.trial').length")
    assert said in text
    assert "hours of trainers" in text, "a CPU has no GPU-hours"
    assert f"out of memory {HOSTILE}" in text
    assert (rows, lines) == (7, 6)
    assert "in best.yaml in probably.yaml" in first
    assert "did not go on" in text
    shown = shown_page(study, found, importances={"learning_rate": 0.75, "lora.rank": 0.25})
    differs = "differs" if lowest["settings"]["lora.rank"] != 16 else ""
    for said in (
        f"learning_rate 0.02 {lowest['settings']['learning_rate']:.4g} differs 75.0%",
        f"lora.rank 16 {lowest['settings']['lora.rank']} {differs} 25.0%".replace("  ", " "),
        "peak memory of a trial 1,000 MB 1",
        "hours of a trial 10 h 0",
        "above its limit: peak memory",
        f"GPU-hours {len(results)} of 100 allowed",  # each result says one
    ):
        assert said in shown, shown


def test_settings_that_are_probably_better_have_an_overlay_of_their_own(folder: Path) -> None:
    search = settings()
    study, results = whole_search(search)
    found = best_unjudged(read_account(study, Study), search.limits)
    found = structs.replace(found, study=sha256_of(study), chosen=0)
    best, probably, judged = (Path("search/s") / name for name in ("best.yaml", "probably.yaml", "judged.json"))
    write_account(judged, found)
    choose_best.main(study=study, judged=judged, results=results, best=best, probably=probably, settings=search)
    (folder / "mine.yaml").write_text(yaml.safe_dump(config()))
    chosen_by = []
    # Of both of them the later one counts, and says what it is.
    for overlays in ([best], [probably], [probably, best], [best, probably]):
        layers = [folder / "mine.yaml", *overlays]
        run = check_config(read_layers(layers), layers).runs["r"]
        assert run.chosen_by is not None
        assert run.chosen_by.study == sha256_of(study)
        chosen_by.append((run.chosen_by.trial, run.chosen_by.shown))
        assert (run.train.learning_rate == OWN["learning_rate"]) == (run.chosen_by.trial == 0)
    assert chosen_by == [(0, True), (found.best, False)] * 2
    page = shown_page(study, found, importances={})
    assert f"? {found.sentence}" in page
    assert f"{found.best} in probably.yaml" in page
    assert "own in best.yaml" in page
    assert "the best by it: too good, for it was chosen by it" in page


def shown_page(study: Path, judged: Judged, importances: dict[str, float]) -> str:
    """Return the text of a page of the same study with importances, limits, and a trial that is above one of them."""
    account = read_account(study, Study)
    worst = max((trial for trial in account.trials if trial.state == "done"), key=lambda trial: trial.value or 0)
    trials = [structs.replace(trial, mem_mb=5000.0) if trial is worst else trial for trial in account.trials]
    account = structs.replace(account, trials=trials, importances=importances)
    page = search_page_of(account, judged, "r", SearchLimits(mem_mb=1000, hours=10, gpu_hours=100), "cuda")
    return " ".join(re.sub("<[^>]+>", " ", page.partition("</style>")[2]).split())


def test_a_search_above_its_budget_is_refused_before_its_first_trial(folder: Path) -> None:
    search = settings(limits={"gpu_hours": 0.001})
    write_account(folder / "estimates/r.json", estimate(some_inputs(), "h100", None))
    with pytest.raises(VlmflowError, match=r"gpu_hours: 0.001, but 2 rounds of 3 trials, and one .* GPU-hours"):
        proposed(search, (0, 0), propose.PlanBlock(rounds=2, gpu="h100"))
    write_account(folder / "checkpoints/r/smoke/gate.json", some_gate())
    with pytest.raises(VlmflowError, match=r"gpu_hours: 0.001, but .* need [\d.e-]+ GPU-hours"):
        proposed(search, (0, 0), propose.PlanBlock(rounds=2, gpu=None), smoke=[Path("checkpoints/r/smoke")])
    assert not Path("search/s/0/0/asked.json").exists()


def test_other_rows_than_those_of_the_account_are_refused(folder: Path) -> None:
    with (folder / "fitted/r/train.lengths.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(VlmflowError, match="records other digests"):
        proposed(settings(), (0, 0), None)
