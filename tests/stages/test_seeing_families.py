"""Models that see of other families than Qwen3-VL: names on disk and in memory, merge, proof, and the whole road."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from families import write_llava, write_qwen2_5_vl
from forked_snakemake import called
from text_run import TRAIN
from tiny_models import file_names, randomise, tensors_of
from training_rows import made_row
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.merging.logit_inputs import inputs_of
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.names_in_memory import loaded_as, saved_as
from vlmflow.merging.verify_logits import verify_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.rows.chat import Turn
from workflow_runs import ROOT

SEEING: dict[str, Callable[[Path], Path]] = {"qwen2_5_vl": write_qwen2_5_vl, "llava1_5_hf": write_llava}

TURNS = [Turn("human", "<image>\nWhat colour is the square?"), Turn("gpt", "It is red, and so is the other one.")]
ROW = made_row("row", TURNS, images=["square.png"])


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("llava1_5_hf", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter of the language model, the tower and what joins them, and their merge."""
    folder = tmp_path_factory.mktemp("run") / request.param
    base = SEEING[request.param](folder / "base")
    layers = r".*(layers|blocks)\.\d+\..*(q_proj|v_proj|qkv|fc1|gate_proj)"
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), LoraConfig(r=4, target_modules=layers))
    randomise(model, 0.1)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "by-peft")
    merge_weights(base, folder / "adapter", folder / "merged", file_names(base), 2)
    Image.new("RGB", (96, 64), "green").save(folder / "square.png")
    return folder


def test_both_ways_give_the_same_names(run: Path) -> None:
    names = tensors_of(run / "base").keys()
    assert loaded_as(run / "base", names) == saved_as(run / "base")
    in_memory = dict(AutoModelForImageTextToText.from_pretrained(run / "base").named_parameters())
    assert set(saved_as(run / "base").values()) >= in_memory.keys()


def test_the_merge_is_pefts(run: Path) -> None:
    merged, by_peft = tensors_of(run / "merged"), tensors_of(run / "by-peft")
    assert merged.keys() == by_peft.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, by_peft[name])
    assert any(not torch.equal(tensor, merged[name]) for name, tensor in tensors_of(run / "base").items())


def test_the_merge_is_proven(run: Path) -> None:
    proof = verify_tensors(run / "base", run / "adapter", run / "merged", file_names(run / "base"), 2)
    assert proof.touched > 8
    arguments = template_arguments(run / "merged", run.name, "default", {"template": run.name})
    inputs = inputs_of([ROW], arguments, run, 64)
    logits = verify_logits(run / "base", run / "adapter", run / "merged", inputs, "cpu", "float32")
    assert logits.verdict == "agree"


def test_an_update_at_another_place_is_found(run: Path) -> None:
    """The proof does not take its names from the merge."""
    file = next(file for file in sorted((run / "merged").glob("*.safetensors")) if changed(run, file))
    name = changed(run, file)[0]
    tensors, before = load_file(file), load_file(run / "base" / file.name)
    kept = file.read_bytes()
    save_file(tensors | {name: before[name]}, file, {"format": "pt"})
    try:
        with pytest.raises(VlmflowError, match=f"tensor {name}, .* as in the base: not merged"):
            verify_tensors(run / "base", run / "adapter", run / "merged", file_names(run / "base"), 2)
    finally:
        file.write_bytes(kept)


def changed(run: Path, file: Path) -> list[str]:
    before = load_file(run / "base" / file.name)
    return [name for name, tensor in load_file(file).items() if not torch.equal(tensor, before[name])]


@pytest.mark.slow
def test_pictures_and_texts_become_proven_weights(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(60):
        Image.new("RGB", (40 + number, 64), (number * 4, 255 - number * 4, 0)).save(tmp_path / f"pictures/{number}.png")
        turns = [("user", "<image>What is it?"), ("assistant", f"It is {number}, and again {number}.")]
        rows.append({"messages": [{"role": who, "content": text} for who, text in turns], "images": [f"{number}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    models, runs = {}, {}
    for name, write in SEEING.items():
        models[name] = {
            "source": str(write(tmp_path / "bases" / name)),
            "model_type": name,
            "template": name,
            "template_differs": True,
        }
        train = TRAIN | {"swift_args": {}, "max_length": 1024, "image_max_tokens": 16}
        run = {"model": name, "dataset": "mine", "device": "cpu", "train": train}
        run["smoke"] = {"steps": 6, "longest": 4, "sample": 4}
        runs |= {f"{name}-{tuner}": run | {"tuner": tuner} for tuner in ("lora", "full")}
    data = {"kind": "messages", "train": "rows.jsonl", "image_roots": ["pictures"], "val_share": 0.1}
    config = {"models": models, "datasets": {"mine": data}, "runs": runs}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    call += ["--configfile", str(tmp_path / "mine.yaml"), "--cores", "2", "--keep-going", "--"]
    done = called([*call, *(f"merged/{run}" for run in runs)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    limits = json.loads((tmp_path / "merged/qwen2_5_vl-lora/preprocessor_config.json").read_text())
    assert limits["max_pixels"] == 16 * 28 * 28
