"""A model folder full of traps passes the whole workflow as a model; nothing else in it is run or published."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from text_run import TRAIN, TRAPS, set_traps
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.summary import fitted_data
from vlmflow.supervisor import launch
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import BaseModel, Training
from workflow_runs import ROOT


def test_nothing_of_it_is_run(text_run: Path) -> None:
    assert os.listdir(text_run / "fired") == []


def test_nothing_of_it_is_published(text_run: Path) -> None:
    merged = {path.relative_to(text_run / "merged/text").as_posix() for path in (text_run / "merged/text").rglob("*")}
    assert {"config.json", "tokenizer.json", "LICENSE", "provenance.json", "README.md"} <= merged
    assert not merged & (TRAPS - {"README.md"})
    assert not any(path.is_symlink() for path in (text_run / "merged/text").rglob("*"))
    assert "Not this card" not in (text_run / "merged/text/README.md").read_text()


def test_files_that_are_left_out_are_named(text_run: Path) -> None:
    facts = json.loads((text_run / "merged/text/provenance.json").read_text())
    assert set(facts["base_model"]["left_out"]) == TRAPS
    assert "LICENSE" in facts["base_model"]["files"]
    log = (text_run / "logs/fetch_model/tiny.log").read_text()
    assert all(name in log for name in TRAPS)


def test_stages_see_only_links_to_a_models_files(text_run: Path) -> None:
    manifest = json.loads((text_run / "models/tiny/manifest.json").read_text())
    seen = {path.relative_to(manifest["folder"]).as_posix(): path for path in Path(manifest["folder"]).rglob("*")}
    assert seen.keys() == manifest["files"].keys()
    assert {path.resolve().parent for path in seen.values()} == {text_run / "tiny"}


def test_the_trainer_never_trusts_remote_code(text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift passes true to each of these calls; transformers gets false."""
    monkeypatch.setattr(launch, "trainer", SimpleNamespace(__name__="recording_worker"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers"), prepend=os.pathsep)
    monkeypatch.setenv("VLMFLOW_TEST_RECORD", str(tmp_path / "record"))
    settings = TrainSettings(**TRAIN | {"max_steps": 1, "checkpoint_steps": 1})
    data = fitted_data(text_run / "fitted/text", settings.max_length, text_run / "stores/pictures")
    base = BaseModel.read(text_run / "models/tiny", "qwen3")
    train(Training(data, base, settings, "cpu", 1, DDP), tmp_path / "runs", 2, "the trainer")
    told = [line.split() for line in (tmp_path / "record").read_text().splitlines()]
    functions = {f"{kind}.from_pretrained" for kind in ("AutoConfig", "AutoTokenizer", "_BaseAutoModelClass")}
    assert functions < {function for function, _ in told}
    assert {value for _, value in told} == {"False"}, told
    assert os.listdir(text_run / "fired") == [], "nor do these run a trap as they start"


LOAD = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
from vlmflow.swift.own_template import refuse_remote_code
for folder in sys.argv[1:]:
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    refuse_remote_code()
"""


def test_the_second_protection_is_enough_by_itself(tmp_path: Path) -> None:
    """Of the whole folder transformers runs Python, unless it is locked, whatever its caller says."""
    for lock in ("open", "locked"):
        write_tiny_model(tmp_path / lock / "model", ["It is 1."], TinyShape(hidden_size=64), seed=1, vision=False)
        set_traps(tmp_path / lock / "model", tmp_path / lock / "fired")
    call = [sys.executable, "-c", LOAD, *(str(tmp_path / lock / "model") for lock in ("open", "locked"))]
    places = {"PYTHONPATH": str(ROOT / "scripts"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(call, env=os.environ | places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.listdir(tmp_path / "open" / "fired") == ["generate"]
    assert os.listdir(tmp_path / "locked" / "fired") == []
