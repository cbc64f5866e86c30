"""Base models without a chat template, and GPT-2's layers, from validated rows to proven weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from families import LLAMA_3_2, LLAMA_TOKENS, write_family, write_gpt2
from forked_snakemake import called
from text_run import TRAIN
from vlmflow.core.account import read_account
from vlmflow.lengths.summary import LengthSummary
from workflow_runs import ROOT


def road(folder: Path, model: dict[str, Any], runs: list[str], smoke: dict[str, int]) -> None:
    """Make proven weights of a model by rows with and without a system turn, LoRA or full."""
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (folder / "rows.json").write_text(json.dumps(rows))
    run = {"model": "base", "device": "cpu", "smoke": smoke, "train": TRAIN | {"swift_args": {}, "max_length": 512}}
    data = {"train": "rows.json", "val_share": 0.1, "kind": "alpaca"}
    config = {
        "models": {"base": model},
        "datasets": {"with": data | {"system_prompt": "Be brief."}, "without": data},
        "runs": {
            f"{tuner}-{rows}": run | {"tuner": tuner, "dataset": rows}
            for tuner, rows in (name.split("-") for name in runs)
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    call += ["--configfile", str(folder / "mine.yaml"), "--cores", "2", "--keep-going", "--"]
    done = called([*call, *(f"merged/{run}" for run in runs)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    for name in runs:
        summary = read_account(folder / "lengths" / name / "summary.json", LengthSummary)
        assert summary.chat_template is not None
        assert summary.chat_template.difference is None
        assert (folder / "merged" / name / "chat_template.jinja").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "marks"), [("plain", []), ("chatml", ["<|im_start|>", "<|im_end|>"])])
def test_gpt_2_becomes_proven_weights(
    form: str, marks: list[str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("road", f"gpt2-{form}")
    source = str(write_gpt2(tmp_path / "gpt2", marks))
    model = {"source": source, "model_type": "polylm", "chat_template": form}
    road(tmp_path, model, ["lora-with", "full-without"], {"steps": 6, "longest": 4, "sample": 4})


@pytest.mark.slow
def test_a_template_that_writes_the_date_is_served_as_it_was_trained(tmp_path: Path) -> None:
    base = write_family("llama", tmp_path / "llama")
    (base / "chat_template.jinja").write_text(LLAMA_3_2)
    assert LLAMA_TOKENS[0] in (base / "tokenizer.json").read_text()
    road(
        tmp_path, {"source": str(base), "date": "2026-01-02"}, ["lora-without"], {"steps": 6, "longest": 4, "sample": 4}
    )
    summary = read_account(tmp_path / "lengths" / "lora-without" / "summary.json", LengthSummary)
    assert (summary.model_type, summary.text_args) == ("llama", {"template": "llama3_2"}), "found by its own files"
    served = (tmp_path / "merged" / "lora-without" / "chat_template.jinja").read_text()
    assert "02 Jan 2026" in served.splitlines()[0]
