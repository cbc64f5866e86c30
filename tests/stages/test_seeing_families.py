"""Models that see of other families than Qwen3-VL: names on disk and in memory, merge, proof, and the whole road."""

import json
import re
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

from forked_snakemake import called
from made_rows import made_row
from seeing_families import SEEING
from text_run import TRAIN
from tiny_models import file_names, randomise, tensors_of
from vlmflow.config.strategies import FULL
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import POSITIONS
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.merging.logits import inputs_of, load, logits_of
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.verify_logits import verify_logits, verify_stored_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.rows.chat import Turn
from vlmflow.swift.meta_model import loaded_as, saved_as
from vlmflow.swift.row_attention import Inputs
from workflow_runs import ROOT

TURNS = [Turn("human", "<image>\nWhat colour is the square?"), Turn("gpt", "It is red, and so is the other one.")]
ROW = made_row("row", TURNS, images=["square.png"])


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "qwen2.5-vl" else [pytest.mark.slow]) for name in SEEING],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter of the language model, the tower and what joins them, and their merge."""
    folder = tmp_path_factory.mktemp("run") / request.param
    base = SEEING[request.param].write(folder / "base")
    layers = r".*(layers?|blocks)\.\d+\..*(q_proj|v_proj|qkv|fc1|gate_proj)"
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), LoraConfig(r=4, target_modules=layers))
    randomise(model, 0.1)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "by-peft")
    merge_weights(base, folder / "adapter", folder / "merged", file_names(base), 2)
    Image.new("RGB", (96, 64), "green").save(folder / "square.png")
    return folder


def test_both_ways_give_the_same_names(run: Path) -> None:
    names = tensors_of(run / "base").keys()
    assert loaded_as(run / "base", names).items() <= saved_as(run / "base").items()
    in_memory = dict(AutoModelForImageTextToText.from_pretrained(run / "base").named_parameters())
    assert set(saved_as(run / "base").values()) >= in_memory.keys()


def test_the_merge_is_pefts(run: Path) -> None:
    merged, by_peft = tensors_of(run / "merged"), tensors_of(run / "by-peft")
    assert merged.keys() == by_peft.keys()
    for name, tensor in merged.items():
        saved = by_peft[name]
        torch.testing.assert_close(tensor, saved if saved.shape == tensor.shape else saved.mT)
    assert any(not torch.equal(tensor, merged[name]) for name, tensor in tensors_of(run / "base").items())


@pytest.fixture(scope="module")
def inputs(run: Path) -> list[Inputs]:
    """A row with a picture, in ms-swift's template of the merged folder."""
    family = SEEING[run.name]
    arguments = template_arguments(run / "merged", family.model_type, "default", {"template": family.template})
    return inputs_of([ROW], arguments, run, 64)


def test_the_merge_is_proven(run: Path, inputs: list[Inputs]) -> None:
    proof = verify_tensors(run / "base", run / "adapter", run / "merged", file_names(run / "base"), 2)
    assert proof.touched >= 8
    assert verify_logits(run / "base", run / "adapter", run / "merged", inputs, "cpu", "float32").verdict == "agree"


def test_a_fine_tune_is_proven(run: Path, inputs: list[Inputs]) -> None:
    """The weights that peft merged, as transformers saves them."""
    base, full, merged, files = run / "base", run / "by-peft", run / "from-full", file_names(run / "base")
    (full / "trained.json").write_text(json.dumps({"tensors": sorted(tensors_of(full))}))
    answers = logits_of(load(full, "cpu", "float32"), inputs[0], POSITIONS)
    stored = {f"row.0.{name}": value for name, value in inputs[0].items()}
    save_file(stored | {"row.0.logits": answers}, full / "logits.safetensors")
    merge_weights(base, full, merged, files, 2)
    assert verify_tensors(base, full, merged, files, 2, FULL).touched == len(tensors_of(base))
    assert verify_stored_logits(base, full, merged, "cpu", "float32").verdict == "agree"


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
@pytest.mark.parametrize("name", SEEING)
def test_pictures_and_texts_become_proven_weights(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """By LoRA and by full fine-tuning, through the workflow's own rules."""
    record_property("road", name)
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(60):
        Image.new("RGB", (40 + number, 64), (number * 4, 255 - number * 4, 0)).save(tmp_path / f"pictures/{number}.png")
        turns = [("user", "<image>What is it?"), ("assistant", f"It is {number}, and again {number}.")]
        rows.append({"messages": [{"role": who, "content": text} for who, text in turns], "images": [f"{number}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    family, source = SEEING[name], str(SEEING[name].write(tmp_path / "base"))
    model = {"source": source, "model_type": family.model_type, "template": family.template, "template_differs": True}
    train = TRAIN | {"swift_args": {}, "max_length": 1024, "image_max_tokens": 16}
    run = {"model": name, "dataset": "mine", "device": "cpu", "train": train}
    run["smoke"] = {"steps": 6, "longest": 4, "sample": 4}
    runs = {tuner: run | {"tuner": tuner} for tuner in ("lora", "full")}
    data = {"kind": "messages", "train": "rows.jsonl", "image_roots": ["pictures"], "val_share": 0.1}
    config = {"models": {name: model}, "datasets": {"mine": data}, "runs": runs}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    call += ["--configfile", str(tmp_path / "mine.yaml"), "--cores", "2", "--keep-going", "--"]
    done = called([*call, *(f"merged/{run}" for run in runs)])
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    if name == "qwen2.5-vl":
        limits = json.loads((tmp_path / "merged/lora/preprocessor_config.json").read_text())
        assert limits["max_pixels"] == 16 * 28 * 28
    unlimited = name in ("llava", "llava-onevision", "gemma3")
    assert ("does not limit" in done.stdout + done.stderr) == unlimited
    if name in ("llava", "gemma3"):
        assert re.findall(r"a picture takes up to (\d+) tokens", done.stdout + done.stderr) == ["4", "4"]
    own = {"internvl": ("max_patches", 3), "mistral3": ("size", {"longest_edge": 84})}
    if name in own:
        limits = json.loads((tmp_path / "merged/lora/processor_config.json").read_text())["image_processor"]
        assert (own[name][0], limits[own[name][0]]) == own[name]
