"""A model folder full of traps passes the whole workflow as a model; nothing else in it is run or published."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forked_snakemake import called
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.fitted import fitted_data
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.training import launch
from vlmflow.training.train import train
from workflow_runs import ROOT

TRAIN = {
    "max_steps": 8,
    "checkpoint_steps": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "dtype": "float32",
    "max_length": 512,
    "dataloader_workers": 0,
    "swift_args": {"template": "qwen3_nothinking", "add_non_thinking_prefix": False},
}

TRAPS = {
    "README.md",
    "args.json",
    "configuration_x.py",
    "custom_generate/generate.py",
    "evil.so",
    "modeling_x.py",
    "outside.pem",
    "plugin.py",
    "pytorch_model.bin",
    "sitecustomize.py",
    "training_args.bin",
    "we\\nird.json",
}
"""The additional files in the folder, as the log and provenance.json name them."""


class Fires:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.file),))


def set_traps(folder: Path, fired: Path) -> None:
    """Add the traps to a model's folder; each trap that runs creates a file of its name in `fired`."""
    fired.mkdir()
    for name in ("configuration_x", "custom_generate/generate", "modeling_x", "plugin", "sitecustomize"):
        (folder / name).parent.mkdir(exist_ok=True)
        mark = fired / Path(name).name
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef generate(*_, **__): ...\n")
    for name in ("pytorch_model.bin", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Fires(fired / name)))
    # ms-swift reads its own arguments from a model's folder; these name Python files to import.
    args = {"external_plugins": [str(folder / "plugin.py")], "swift_version": "4.6.0"}
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "README.md").write_text("# Not this card\n")
    (folder / "evil.so").write_bytes(b"\x7fELF")
    (folder / "we\nird.json").write_text("{}")
    (folder / "LICENSE").write_text("All yours.\n")
    (fired.parent / "secret").write_text("not to be published")
    (folder / "outside.pem").symlink_to(fired.parent / "secret")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which such a model was trained, merged and verified."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (folder / "rows.json").write_text(json.dumps(rows))
    texts = [text for row in rows for text in row.values()]
    write_tiny_model(folder / "model", texts, TinyShape(hidden_size=64), seed=1, vision=False)
    set_traps(folder / "model", folder / "fired")
    mine = {
        "models": {"tiny": {"source": "model", "model_type": "qwen3"}},
        "datasets": {"alpaca": {"train": "rows.json#60", "val_share": 0.1}},
        "runs": {
            "text": {
                "model": "tiny",
                "dataset": "alpaca",
                "device": "cpu",
                "processes": 1,
                "cached_dataset": True,
                "train": TRAIN,
                "smoke": {"steps": 6, "longest": 4, "sample": 4},
                "verify": {"rows": 2},
            }
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    files = ["--configfile", str(folder / "mine.yaml"), "--cores", "2", "--"]
    done = called([*call, *files, "merged/text"])
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return folder


def test_nothing_of_it_is_run(hostile: Path) -> None:
    assert os.listdir(hostile / "fired") == []


def test_nothing_of_it_is_published(hostile: Path) -> None:
    merged = {path.relative_to(hostile / "merged/text").as_posix() for path in (hostile / "merged/text").rglob("*")}
    assert {"config.json", "tokenizer.json", "LICENSE", "provenance.json", "README.md"} <= merged
    assert not merged & (TRAPS - {"README.md"})
    assert not any(path.is_symlink() for path in (hostile / "merged/text").rglob("*"))
    assert "Not this card" not in (hostile / "merged/text/README.md").read_text()


def test_what_is_left_out_is_named(hostile: Path) -> None:
    facts = json.loads((hostile / "merged/text/provenance.json").read_text())
    assert set(facts["base_model"]["left_out"]) == TRAPS
    assert "LICENSE" in facts["base_model"]["files"]
    log = (hostile / "logs/fetch_model/tiny.log").read_text()
    assert all(name in log for name in TRAPS)


def test_stages_see_only_links_to_a_models_files(hostile: Path) -> None:
    manifest = json.loads((hostile / "models/tiny/manifest.json").read_text())
    seen = {path.relative_to(manifest["folder"]).as_posix(): path for path in Path(manifest["folder"]).rglob("*")}
    assert seen.keys() == manifest["files"].keys()
    assert {path.resolve().parent for path in seen.values()} == {hostile / "model"}


def test_the_trainer_never_trusts_remote_code(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift passes true to each of these calls; transformers gets false."""
    monkeypatch.setattr(launch, "trainer", SimpleNamespace(__name__="recording_worker"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers"))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    settings = TrainSettings(**TRAIN | {"max_steps": 1, "checkpoint_steps": 1})
    data = fitted_data(hostile / "fitted/text", settings.max_length, hostile / "stores/pictures")
    base = BaseModel.read(hostile / "models/tiny", "qwen3")
    train(Training(data, base, settings, "cpu", 1, DDP), tmp_path / "runs", 2, "the trainer")
    told = [line.split() for line in (tmp_path / "record").read_text().splitlines()]
    functions = {f"{kind}.from_pretrained" for kind in ("AutoConfig", "AutoTokenizer", "_BaseAutoModelClass")}
    assert functions < {function for function, _ in told}
    assert {value for _, value in told} == {"False"}, told


LOAD = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
from vlmflow.swift.no_remote_code import refuse_remote_code
if sys.argv[2] == "locked":
    refuse_remote_code()
AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


@pytest.mark.parametrize("lock", ["locked", "open"])
def test_the_second_protection_is_enough_by_itself(tmp_path: Path, lock: str) -> None:
    """From the whole folder transformers would run Python, whatever its caller says, without this protection."""
    write_tiny_model(tmp_path / "model", ["It is 1."], TinyShape(hidden_size=64), seed=1, vision=False)
    set_traps(tmp_path / "model", tmp_path / "fired")
    call = [sys.executable, "-c", LOAD, str(tmp_path / "model"), lock]
    places = {"PYTHONPATH": str(ROOT / "scripts"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(call, env=os.environ | places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.listdir(tmp_path / "fired") == ([] if lock == "locked" else ["generate"])
