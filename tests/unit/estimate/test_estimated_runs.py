"""The estimate of a run from the files of earlier stages, its verdict, and the recipes: each fits its GPU."""

import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from made_accounts import some_report
from made_inputs import settings_of, some_inputs
from stages.estimate_run import main as estimate_run
from vlmflow.config.gpus import GPUS
from vlmflow.config.model import check_config
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.estimate.account import Compared, Estimate, NoEstimate, compare, read_estimate
from vlmflow.estimate.changes import FITS, in_words, judge, share
from vlmflow.estimate.estimate import estimate
from vlmflow.estimate.memory import memory
from vlmflow.fetch.placed import write_small_files
from vlmflow.lengths.summary import LengthSummary, MaxLengths, MeasuredFiles, NamedRow, SplitLengths
from workflow_runs import ROOT

MODEL = ROOT / "tests" / "published" / "Qwen3-VL-8B-Instruct"
SPLIT = SplitLengths(2, 900, 700, 200, 400, 500, [NamedRow("b", 500, 100)])
HEAVY = ("torch", "transformers", "tokenizers", "swift", "peft")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with lengths of two rows, their account, and the 8B's config.json; the working directory of the run."""
    folder = tmp_path / "lengths" / "mine"
    folder.mkdir(parents=True)
    rows = [
        {"id": name, "start": 0, "end": 9, "text_tokens": text, "picture_tokens": 100}
        for name, text in (("a", 300), ("b", 400))
    ]
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    digests = MeasuredFiles({}, {f"{name}.jsonl": sha256_of(folder / f"{name}.jsonl") for name in ("train", "val")}, {})
    write_account(
        folder / "summary.json",
        LengthSummary(
            train=SPLIT,
            val=SPLIT,
            max_length=MaxLengths(512, 512),
            image_max_tokens=64,
            text_args={},
            compared_with_ms_swift=2,
            digests=digests,
        ),
    )
    write_small_files(tmp_path / "model_files", MODEL, ["config.json", "preprocessor_config.json"], "hf://o/m", None)
    return tmp_path


def run(place: Path, **settings: object) -> Estimate | NoEstimate:
    lengths = place / "lengths" / "mine"
    estimate_run(
        train=lengths / "train.jsonl",
        val=lengths / "val.jsonl",
        summary=lengths / "summary.json",
        model_files=place / "model_files",
        estimate=place / "estimates" / "mine.json",
        settings=settings_of(**settings),
    )
    return read_estimate(place / "estimates" / "mine.json")


def test_the_account_is_that_of_the_rows_and_the_model(place: Path) -> None:
    found = run(place, gpu="h100", gpu_hour_price=2.0)
    assert isinstance(found, Estimate)
    assert (found.rows, found.tokens, found.longest, found.steps) == (2, 900, 500, 1)
    assert found.weights == 8_767_123_696
    assert found.on("h100").slow_price is not None


SIZES = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 64)
ODD_HEADS = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 15}


@pytest.mark.parametrize(
    ("config", "named"),
    [({"model_type": "qwen3", "hidden_size": "wide"}, "hidden_size"), (ODD_HEADS | SIZES, "head_dim")],
)
def test_a_damaged_config_stops_a_run_unless_the_estimate_is_ignored(
    config: dict[str, object], named: str, place: Path
) -> None:
    damaged = place / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text(json.dumps(config))
    shutil.rmtree(place / "model_files")
    write_small_files(place / "model_files", damaged, ["config.json"], "hf://o/m", None)
    with pytest.raises(VlmflowError, match=r"config\.json"):
        run(place)
    found = run(place, estimate="ignore")
    assert isinstance(found, NoEstimate)
    assert named in found.reason


def test_a_run_that_does_not_fit_leaves_no_account(place: Path) -> None:
    with pytest.raises(VlmflowError, match=r"on each of 1 GPU by the estimate, \d+% of GeForce RTX 4090's 24 GB"):
        run(place, gpu="rtx-4090", tuner="full")
    assert not (place / "estimates").exists()
    assert isinstance(run(place, gpu="rtx-4090", tuner="full", estimate="ignore"), Estimate)
    assert isinstance(run(place, gpu="rtx-4090", tuner="full", device="cpu"), Estimate)


def test_a_model_that_the_estimate_does_not_know_is_no_reason_to_stop(place: Path) -> None:
    config = place / "published"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "qwen9"}')
    shutil.rmtree(place / "model_files")
    write_small_files(place / "model_files", config, ["config.json"], "hf://o/m", None)
    found = run(place, gpu="h100")
    assert isinstance(found, NoEstimate)
    assert "model_type 'qwen9'" in found.reason


def test_lengths_that_changed_are_refused(place: Path) -> None:
    with (place / "lengths" / "mine" / "train.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(VlmflowError, match=r"records other digests for these rows\n.*--forcerun measure_lengths"):
        run(place)


def test_no_torch_is_needed() -> None:
    """An estimate whose passes are in the cache starts in a second."""
    blocked = f"""
import sys
class Blocked:
    def find_spec(self, name, *others):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from stages import estimate_run, estimate_page, fetch_model_files
"""
    subprocess.run([sys.executable, "-c", blocked], check=True, env={"PYTHONPATH": str(ROOT / "scripts")})


GB = 10**9


def of(gpu: str | None, train: dict[str, Any] | None = None, **others: Any) -> Estimate:
    return estimate(some_inputs(train, **others), gpu, None)


def test_a_run_that_does_not_fit_is_refused_with_what_would_make_it_fit() -> None:
    found = of("rtx-4090", {"per_device_batch_size": 4})
    with pytest.raises(VlmflowError) as refusal:
        judge(found, "mine", on_gpu=True, ignored=False)
    error = refusal.value
    assert f"mine: {found.memory.total / GB:.1f} GB on each of 1 GPU" in error.cause
    assert "GeForce RTX 4090's 24 GB: " in error.cause
    assert f"weights {found.memory.weights / GB:.1f}" in error.cause
    pair = "train.per_device_batch_size: 1, train.gradient_accumulation_steps: 32; tuner: qlora"
    assert error.next_step.startswith(f"cheapest first: {pair} (")
    assert "runs.NAME.estimate: ignore" in error.next_step


def test_several_nodes_are_named_with_the_processes_of_each() -> None:
    found = of("a40", tuner="full", nodes=2, processes=2)
    assert "on each of 4 GPUs (2 nodes × 2 processes) by the estimate" in in_words(found, "mine", on_gpu=True)
    assert "each of 4 processes (2 nodes × 2 processes)" in in_words(found, "mine", on_gpu=False)


def test_an_account_without_nodes_is_of_one() -> None:
    """As estimates were written before there were several."""
    content = msgspec.to_builtins(of("h100", nodes=2))
    assert msgspec.convert(content, Estimate).nodes == content.pop("nodes") == 2
    assert msgspec.convert(content, Estimate).nodes == 1


def test_estimate_ignore_lets_it_start_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    judge(of("rtx-4090", {"per_device_batch_size": 4}), "mine", on_gpu=True, ignored=True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "It may not fit" in record.message


def test_a_run_between_both_thresholds_starts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = of("rtx-4090")
    on = found.on("rtx-4090")
    assert on is not None
    assert 0.9 < on.memory_share < 1.1
    judge(found, "mine", on_gpu=True, ignored=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("gpu", "on_gpu", "said"),
    [
        ("h200", True, "of H200 SXM 141 GB's 141 GB"),
        (None, True, "names no product"),
        ("rtx-4090", False, "of main memory for each of 1 process"),
    ],
)
def test_all_others_start_with_one_line(
    gpu: str | None, on_gpu: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU nothing is refused."""
    with caplog.at_level(logging.INFO, "vlmflow"):
        judge(of(gpu, {"per_device_batch_size": 4} if not on_gpu else None), "mine", on_gpu=on_gpu, ignored=False)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert said in record.message


def named(found: list[Compared]) -> dict[str, Compared]:
    return {one.name: one for one in found}


def test_estimate_and_measured_are_compared() -> None:
    found = of("h100")
    on = found.on("h100")
    assert on is not None
    speed = found.tokens / on.slow.seconds
    report = some_report(
        device="NVIDIA H100",
        peak_memory=[found.memory.total * 2, found.memory.total],
        tokens_per_second=speed / 2,
        target=found.steps,
        steps=found.steps,
        seconds=on.slow.seconds * 2,
    )
    rows = named(compare(found, report))
    assert rows["memory of one GPU"].error == pytest.approx(-0.5)
    assert rows["speed of all GPUs"].error == pytest.approx(1.0)
    assert rows["optimizer steps"].error == 0
    assert rows["training and evaluations"].error == pytest.approx(-0.5)


def test_a_measured_value_within_the_range_is_no_error() -> None:
    assert Compared("x", "hours", 2.0, 3.0, up_to=4.0).error == 0
    assert Compared("x", "hours", 2.0, 8.0, up_to=4.0).error == -0.5
    assert Compared("x", "hours", 2.0, None).error is None
    assert Compared("x", "hours", None, 2.0).error is None


def test_a_smoke_run_has_neither_the_steps_nor_the_hours_of_the_run() -> None:
    found = of("h100")
    rows = named(compare(found, some_report(device="NVIDIA H100", target=found.steps + 1)))
    assert rows.keys() == {"memory of one GPU", "speed of all GPUs"}
    assert named(compare(found, some_report(device="cpu", target=found.steps))).keys() == {"optimizer steps"}


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def costs() -> object:
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    try:
        import full_run_cost
    finally:
        sys.path.pop(0)
    return full_run_cost


MEASURED = [pytest.param(file, marks=pytest.mark.slow if "32b" in file.stem else (), id=file.stem) for file in RECIPES]
"""To measure a 32B model takes ten seconds."""


@pytest.mark.parametrize("file", MEASURED)
def test_a_recipe_fits_up_to_the_max_length_that_it_names(file: Path, costs: object) -> None:
    """With rows of that length, each with one picture of the whole budget."""
    named = int(re.search(r"fits up to max_length (\d+)", file.read_text())[1])
    line = costs._of_recipe(file)
    gpu, own = GPUS[line.settings.gpu], line.settings.train.max_length
    assert costs.longest(line) == named >= own
    rows = costs.full_rows(line, own)
    assert share(costs.inputs_for(line, rows, rows), gpu) <= FITS


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_complete(file: Path) -> None:
    """Beside config.yaml it needs nothing; its comments name itself."""
    both = yaml.safe_load((ROOT / "config.yaml").read_text())
    recipe = yaml.safe_load(file.read_text())
    merged = {key: both.get(key, {}) | recipe.get(key, {}) for key in both.keys() | recipe.keys()}
    ((name, run),) = recipe["runs"].items()
    settings = check_config(merged, [file]).runs[name]
    assert settings.gpu is not None
    assert f"vlmflow estimate recipes/{file.name}\n" in file.read_text()
    each = settings.train.per_device_batch_size * settings.train.gradient_accumulation_steps
    assert run["processes"] * each == 32


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(costs: object) -> None:
    inputs, room = some_inputs(rows=[(300, 256)] * 40), 40 * 10**9
    most = costs.largest_micro_batch(inputs, room)
    assert most is not None
    assert most % 1_024 == 0
    fits, more = (memory(replace(inputs, micro_batch_tokens=tokens)).total for tokens in (most, most + 1_024))
    assert fits <= room < more
    assert costs.largest_micro_batch(inputs, 10**12) == 131_072
    assert costs.largest_micro_batch(inputs, 15 * 10**9) is None, "the weights alone take more"
    with_long_row = some_inputs({"max_length": 65_536}, rows=[(300, 256)] * 40 + [(60_000, 0)])
    assert costs.largest_micro_batch(with_long_row, room) is None, "a row cannot be cut"


def test_each_way_has_a_recipe() -> None:
    assert [file.stem for file in RECIPES] == [
        *("32b-lora-4x80gb", "32b-qlora-80gb", "8b-full-8x80gb", "8b-lora-80gb", "8b-qlora-24gb"),
    ]


def test_the_readme_has_the_table_that_the_command_prints() -> None:
    command = [sys.executable, str(ROOT / "tests" / "bench" / "full_run_cost.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 8
    assert printed in (ROOT / "README.md").read_text()
