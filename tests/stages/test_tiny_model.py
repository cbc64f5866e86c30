"""The tiny model: reproducible, loads offline like a real one, and learns with an adapter."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from vlmflow.demo.sample import write_sample
from vlmflow.demo.tiny_model import FIRST_SPECIAL_ID, TinyShape, fire_texts, write_tiny_model
from vlmflow.rows.chat import Reject
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.trajectories import trajectory_row
from workflow_runs import ROOT

SMALL = TinyShape(hidden_size=32, layers=2, merges=100)
TEXTS = ["Which shape is red?", "It is a circle."] * 10
MAKE_TINY_MODEL = ROOT / "scripts" / "vlmflow" / "tools" / "make_tiny_model.py"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, TEXTS, SMALL, seed=1)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_two_runs_write_the_same_bytes_whatever_the_threads_and_the_seed_outside(tmp_path, small):
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        write_tiny_model(tmp_path / "again", TEXTS, SMALL, seed=1)
    finally:
        torch.set_num_threads(threads)
    assert digests(tmp_path / "again") == digests(small)
    write_tiny_model(tmp_path / "other", TEXTS, SMALL, seed=2)
    assert digests(tmp_path / "other")["config.json"] == digests(small)["config.json"]
    assert digests(tmp_path / "other") != digests(small)


def test_weights_are_in_two_shards_with_decoder_layers_in_both(small):
    index = json.loads((small / "model.safetensors.index.json").read_bytes())["weight_map"]
    shards = sorted(set(index.values()))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    layers = {shard for name, shard in index.items() if ".layers." in name}
    assert layers == set(shards)
    for shard in shards:
        assert (small / shard).stat().st_mode & 0o777 == 0o644
        with safe_open(small / shard, "pt") as file:
            assert {name for name, place in index.items() if place == shard} == set(file.keys())
            assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in file.keys())  # noqa: SIM118


def test_a_tied_head_is_stored_once(small):
    index = json.loads((small / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert AutoConfig.from_pretrained(small).tie_word_embeddings
    assert not [name for name in index if "lm_head" in name]


@pytest.mark.parametrize(("size", "tokens"), [((64, 64), 4), ((160, 128), 20), ((1600, 1200), 64)])
def test_plain_transformers_load_it_and_see_the_picture(small, size, tokens):
    processor = AutoProcessor.from_pretrained(small)
    model = AutoModelForImageTextToText.from_pretrained(small)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which shape is red?"}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    logits = []
    for colour in ("red", "blue"):
        inputs = processor(text=[prompt], images=[Image.new("RGB", size, colour)], return_tensors="pt")
        seen = int((inputs["input_ids"] == model.config.image_token_id).sum())
        assert seen <= tokens
        assert seen >= tokens * 0.75
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    assert torch.isfinite(logits[0]).all()
    assert not torch.equal(logits[0], logits[1]), "the picture changes nothing"


def test_a_text_model_loads_as_qwen3(tmp_path):
    write_tiny_model(tmp_path / "text", TEXTS, SMALL, seed=1, vision=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size < 512, "a text model needs no gap below its special tokens"
    inputs = AutoTokenizer.from_pretrained(tmp_path / "text")("It is a circle.", return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()


@pytest.mark.slow  # the demo's training shows it too
def test_an_adapter_learns_the_sample(tmp_path):
    """Loss on unseen answers: first about that of random guessing, then less than half of it."""
    write_sample(tmp_path / "fire", 60, 48, seed=1)
    raw = [tmp_path / "fire" / "FIRE-train-100K.json"]
    write_tiny_model(tmp_path / "tiny", fire_texts(raw), TinyShape(), seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    examples = [tokenizer(text, return_tensors="pt")["input_ids"] for text in _conversations(raw[0])]
    held_out, train = examples[:6], examples[6:]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    layers = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=layers))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    before = _loss(model, held_out)
    for step in range(40):
        loss = model(input_ids=train[step % len(train)], labels=train[step % len(train)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(before - math.log(FIRST_SPECIAL_ID)) < 3
    assert _loss(model, held_out) < before / 2


def _conversations(raw: Path) -> list[str]:
    trajectories = [read_trajectory(json.dumps(row).encode()) for row in json.loads(raw.read_bytes())]
    rows = [trajectory_row("id", each) for each in trajectories if not isinstance(each, Reject)]
    return ["\n".join(turn.value.removeprefix("<image>\n") for turn in row.conversations) for row in rows]


def _loss(model: torch.nn.Module, examples: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(model(input_ids=ids, labels=ids).loss.item() for ids in examples) / len(examples)


def test_the_script_makes_what_the_function_makes(tmp_path):
    write_sample(tmp_path / "fire", 50, 48, seed=1)
    raw = [tmp_path / "fire" / "FIRE-train-100K.json", tmp_path / "fire" / "FIRE-test.json"]
    command = [sys.executable, MAKE_TINY_MODEL, "--folder", tmp_path / "script", "--seed", "5"]
    options = ["--text", json.dumps([str(path) for path in raw]), "--shape", "{hidden_size: 32, merges: 300}"]
    subprocess.run([*command, *options], check=True)
    write_tiny_model(tmp_path / "function", fire_texts(raw), TinyShape(hidden_size=32, merges=300), seed=5)
    assert digests(tmp_path / "script") == digests(tmp_path / "function")
