"""Training from ms-swift's cached data set is the same training, but does not read rows and pictures at every start."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.fitted import fitted_data
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.swift.child_process import progress_line
from vlmflow.training.cached_dataset import arguments, cache_dataset
from vlmflow.training.report import report
from vlmflow.training.train import train
from workflow_runs import RUN, copy_folder, snakemake, speeds

SETTINGS = TrainSettings(
    max_steps=4,
    checkpoint_steps=4,
    evaluation_steps=4,
    dtype="float32",
    max_length=512,
    image_max_tokens=64,
    dataloader_workers=0,
    gradient_checkpointing=False,
    gradient_accumulation_steps=1,
)


@pytest.fixture(scope="module")
def cached(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo with a cached run, made by the rule."""
    folder = copy_folder(demo_run, tmp_path_factory.mktemp("cached") / "demo_run")
    snakemake(folder, f"cached/{RUN}", f"reports/lengths-{RUN}.html")
    return folder


def job(demo_run: Path, settings: TrainSettings = SETTINGS) -> Training:
    manifest = demo_run / "images" / "fire" / "train.jsonl"
    data = fitted_data(demo_run / "fitted" / RUN, settings.max_length, demo_run / "stores" / "pictures", [manifest])
    return Training(data, BaseModel(demo_run / "tiny-model", "qwen3_vl", "digest"), settings, "cpu", 1, DDP)


@pytest.mark.parametrize("swift_args", [{}, pytest.param({"group_by_length": True}, marks=pytest.mark.slow)])
def test_losses_are_the_same_with_and_without_the_cache(cached: Path, tmp_path: Path, swift_args: dict) -> None:
    """To the last digit, at every step; the same rows in the same order."""
    plain = job(cached, SETTINGS.model_copy(update={"swift_args": swift_args}))
    from_cache = replace(plain, cached=cached / "cached" / RUN)
    assert plain.digest() == from_cache.digest(), "a run resumes from its checkpoint, however it reads its rows"
    trained = [train(each, tmp_path / name, 2, name) for name, each in (("plain", plain), ("cached", from_cache))]
    one, other = (report(plain, each) for each in trained)
    assert one.losses == other.losses
    assert one.eval_losses == other.eval_losses
    assert len(one.losses) == 4
    log = trained[1].folder.trainer_log.read_text(errors="replace")
    assert "Map" not in log, "ms-swift measured rows again"


def test_every_stage_reports_its_speed(cached: Path) -> None:
    """Rows per second with the time left, as in test_rows_workflow.py, from measure_lengths on."""
    stages = {
        "measure_lengths": ["token lengths of train.jsonl", "the check of token lengths"],
        "lengths_page": [f"reading lengths/{RUN}/train.jsonl", f"reading lengths/{RUN}/val.jsonl"],
        "fit_rows": ["fitting train.jsonl", "fitting val.jsonl"],
        "cache_dataset": [f"cache_dataset {RUN}"],
    }
    for rule, expected in stages.items():
        said = {what.partition("DEBUG ")[2]: unit for what, unit in speeds(cached, rule).items()}
        assert {what: said.get(what) for what in expected} == dict.fromkeys(expected, "rows")


def test_train_model_takes_the_cache_where_the_run_has_one(cached: Path) -> None:
    more = f"runs={{{RUN}: {{cached_dataset: true}}}}"
    planned = snakemake(cached, "-n", f"checkpoints/{RUN}/full", "--config", more)
    assert f"cached/{RUN}" in planned


def test_packs_are_made_only_from_the_cached_lengths(cached: Path) -> None:
    """No row is read or encoded for them. (Training on packs needs flash attention, and so a GPU.)"""
    from datasets import load_from_disk  # here: it takes seconds, and all test processes read this file
    from swift.dataset import LazyLLMDataset, PackingDataset

    rows = load_from_disk(str(cached / "cached" / RUN / "train"))

    def encode(*words: object, **more: object) -> None:
        raise AssertionError("a row was encoded")

    template = SimpleNamespace(max_length=512, encode=encode)
    packs = PackingDataset(template, LazyLLMDataset(rows, encode, strict=True))
    assert sorted(number for pack in packs.packed_idx for number in pack) == list(range(len(rows)))
    lengths = [sum(length) for length in rows["lengths"]]
    assert packs.packed_length == [sum(lengths[number] for number in pack) for pack in packs.packed_idx]
    assert max(packs.packed_length) <= 512
    assert len(packs.packed_idx) < len(rows) / 2


def test_a_cache_of_other_lengths_is_refused(cached: Path, tmp_path: Path) -> None:
    """Every row is compared; here the lengths have a larger picture budget than the cache."""
    rows = cached / "fitted" / RUN
    smaller = job(cached, SETTINGS.model_copy(update={"image_max_tokens": 4}))
    with pytest.raises(VlmflowError, match="ms-swift cached 200 rows of"):
        cache_dataset(smaller, rows, tmp_path, 2, "cache_dataset r")


@pytest.mark.slow
def test_another_number_of_processes_caches_the_same_bytes(cached: Path, tmp_path: Path) -> None:
    """The rule used two. Even for one process ms-swift gets two, because its state.json would differ."""
    ours = replace(job(cached), model=BaseModel.read(cached / "models" / "tiny", "qwen3_vl"))
    assert arguments(ours, tmp_path, 1) == arguments(ours, tmp_path, 2)
    cache_dataset(ours, cached / "fitted" / RUN, tmp_path, 3, "cache_dataset r")
    expected, made = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*")}
        for folder in (cached / "cached" / RUN, tmp_path)
    )
    assert made.keys() == expected.keys()
    assert [name for name, content in made.items() if content != expected[name]] == []


def test_the_progress_of_ms_swift_is_shown_in_our_format() -> None:
    bars = ["Map: 48%|█| 11/23 [00:00<00:00, 83.65 examples/s]", "Map: 43%|█| 1000/2300 [00:10<00:13, 99.6 examples/s]"]
    assert progress_line("\r".join(bars)) == "1,000 of 2,300 rows · 100 rows/s · 00:13 left"
    assert progress_line("[INFO:swift] nothing yet") is None
    assert progress_line("Map: 100%|##| 23/23 [00:01<00:00, 122.3 examples/s]") is None, "the stage tells its own end"
