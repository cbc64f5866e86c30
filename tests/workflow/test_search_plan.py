"""The plan of a search: a plain DAG whose files are all known beforehand."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked_snakemake import called
from workflow_runs import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a model's files, as far as a plan looks at them, and rows."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.json").write_text("[]")
    return tmp_path


def planned(
    folder: Path,
    *targets: str,
    run: dict[str, Any] | None = None,
    code: int = 0,
    words: Sequence[str] = (),
    **search: Any,
) -> str:
    """Return what a dry run of a search says. code: with which it must end. words: more of the command."""
    space = {"learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}}
    mine = {
        "models": {"tiny": {"source": "tiny", "model_type": "qwen3", "template": "qwen3"}},
        "datasets": {"alpaca": {"train": "rows.json"}},
        "runs": {"r": {"model": "tiny", "dataset": "alpaca", "device": "cpu"} | (run or {})},
        "search": {"s": {"run": "r", "space": space, **search}},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called([*call, "--configfile", str(folder / "mine.yaml"), "--cores", "2", *words, "-n", "--", *targets])
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def jobs(said: str) -> dict[str, int]:
    """Return how often a plan has each rule."""
    table = said[said.rindex("Job stats:") :]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}


def test_a_search_is_planned_whole(folder: Path) -> None:
    said = planned(folder, "search/s/best.yaml", "reports/search-s.html", rounds=2, together=4, rungs=2)
    found = jobs(said)
    assert {name: found[name] for name in ("propose", "trial", "tell", "judge_best", "choose_best", "search_page")} == {
        "propose": 4,
        "trial": 14,
        "tell": 4,
        "judge_best": 1,
        "choose_best": 1,
        "search_page": 1,
    }
    assert found["train_smoke"] == 1
    assert "train_model" not in found
    assert "merge_weights" not in found


def test_without_a_product_a_budget_is_compared_with_the_smoke_run(folder: Path) -> None:
    first = "search/s/0/0/asked.json"
    assert "train_smoke" not in jobs(planned(folder, first))
    assert "train_smoke" in jobs(planned(folder, first, limits={"gpu_hours": 5}))
    on_gpu = {"gpu": "h100", "device": "cuda"}
    assert "train_smoke" not in jobs(planned(folder, first, run=on_gpu, limits={"gpu_hours": 5}))


def test_no_run_needs_a_search(folder: Path) -> None:
    assert not {"propose", "trial", "tell"} & jobs(planned(folder, "merged/r")).keys()


def test_a_trial_is_refused_where_its_run_cannot_train(folder: Path) -> None:
    said = planned(folder, "search/s/best.yaml", run={"processes": 999}, code=1)
    assert "runs.r.processes: 999 trainers on device cpu" in said


def test_a_result_that_is_deleted_alone_is_made_again(folder: Path) -> None:
    """On this machine's disk and in a storage: Snakemake itself makes no input again that nothing needs."""
    results = [f"search/s/{number}/0/{slot}.json" for number in range(2) for slot in range(3 - number)]
    asked = ["asked.json", "asked.journal", "study.json", "study.journal"]
    study = [f"search/s/{number}/0/{file}" for number in range(2) for file in asked]
    data = ["data/alpaca/stats.json", "data/alpaca/val.jsonl"]
    of_run = [*data, "fitted/r", "estimates/r.json", "chosen/r/val", "checkpoints/r/smoke", "models/tiny"]
    chosen = [f"search/s/{name}" for name in ("judged.json", "best.yaml", "probably.yaml")]
    made = [*of_run, *study, *results, *chosen, "reports/search-s.html"]
    stored = ["--default-storage-provider", "fs", "--default-storage-prefix", str(folder / "stored")]
    for source in folder.rglob("*"):
        os.utime(source, (1e8, 1e8))
    for place, words, target in (
        (folder, [], "search/s/probably.yaml"),
        (folder / "stored", stored, "reports/search-s.html"),
    ):
        for name in made:
            whole(place / name)
        assert "Nothing to be done" in planned(folder, target, words=words, rounds=2, together=2)
        (place / results[0]).unlink()
        found = jobs(planned(folder, target, words=words, rounds=2, together=2))
        assert found["trial"] >= 1
        assert found["tell"] == 2
        assert "train_smoke" not in found


def whole(file: Path) -> None:
    """Make a file, or a folder where the name has no suffix, as old as all others."""
    if file.suffix:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    else:
        file.mkdir(parents=True)
    os.utime(file, (1e9, 1e9))


def test_a_missing_environment_is_said_by_a_dry_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_VENV_SEARCH", str(folder / "no-venv"))
    said = planned(folder, "search/s/best.yaml", code=1)
    assert "the environment `search` is not installed" in said
    assert "vlmflow env search" in said


def test_that_no_tracker_can_be_told_is_said_by_a_dry_run_and_refuses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFLOW_VENV_TRACK", str(folder / "no-venv"))
    said = planned(folder, run={"track": {"mlflow": "sqlite:///mlflow.db"}})
    assert jobs(said)["track"] == 1
    assert "the rule track will fail, and nothing else: " in said
    assert "vlmflow env track" in said


@pytest.mark.parametrize(
    ("space", "advice"),
    [
        ({"lora": {"rank": [4, 8]}}, "search.s.space: lora is a block; name each of its keys with a dot, as in"),
        ({"learning_rate": 0.1}, "search.s.space: learning_rate: 0.1 leaves nothing to choose; list values"),
    ],
)
def test_a_space_of_another_form_is_refused_with_its_form(folder: Path, space: dict[str, Any], advice: str) -> None:
    assert advice in planned(folder, "search/s/best.yaml", code=1, space=space)
