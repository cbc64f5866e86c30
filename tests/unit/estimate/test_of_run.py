"""The estimate of a run from the files of earlier stages, and what it needs to compute."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from made_inputs import settings_of
from stages.estimate_run import main as estimate_run
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.estimate.account import Estimate, NoEstimate, read_estimate
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
