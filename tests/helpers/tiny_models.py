"""Small base models and adapters, also in FP8, written by transformers and peft, for merging and verifying."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from made_accounts import report_of
from vlmflow.core.account import write_account
from vlmflow.fetch.model_files import CONFIG, INDEX
from workflow_runs import TRAIN_ROWS, script

WIDE = (4608, 2048)
"""Rows and columns of the layers of a wide base."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


VARIANTS: dict[str, dict[str, Any]] = {
    "all linear layers": {"target_modules": LINEAR},
    "rslora": {"use_rslora": True},
    "rank and alpha patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6, "1.self_attn.o_proj": 3},
        "alpha_pattern": {"^model.layers.0.mlp.down_proj": 32, "k_proj": 1},
    },
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "output head": {"target_modules": ["lm_head", "v_proj"]},
    "modules to save": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "biases": {"target_modules": ATTENTION, "bias": "all"},
    "dora": {"use_dora": True},
    "dora, rslora, patterns": {"use_dora": True, "use_rslora": True, "rank_pattern": {"up_proj": 7}},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
"""Settings of the adapters that the merge supports, for a base of `write_base` with attention_bias."""


def write_base(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write a Qwen3 with 60,000 weights in several shards, and placeholders for the tokenizer's files."""
    torch.manual_seed(1)
    config = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        **settings,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    randomise(model, 0.05)
    return _save(model.to(dtype), folder, 4000 * dtype.itemsize)


def write_text_model(folder: Path) -> None:
    """Write the demo's `sample` and model (`vl`), and `tiny`: a base of `write_base` with that model's tokenizer."""
    script("make_sample", folder=folder / "sample", train_rows=TRAIN_ROWS)
    script("make_tiny_model", folder=folder / "vl", text=f"[{folder}/sample/FIRE-train-100K.json]")
    sizes = json.loads((folder / "vl" / "config.json").read_text())["text_config"]
    write_base(folder / "tiny", vocab_size=sizes["vocab_size"], eos_token_id=sizes.get("eos_token_id"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / "vl" / name, folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").unlink()  # a placeholder; the tokenizer's files have the chat template


def write_gpt2(folder: Path) -> Path:
    """Write a GPT-2, whose linear layers store their weights transposed, in one file."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return _save(GPT2LMHeadModel(config), folder, 10**9)


def write_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **lora: Any) -> Path:
    """Write a LoRA adapter as after a training: every trained tensor is random, in `dtype`."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    lora = {"target_modules": LINEAR, "r": 4, "lora_alpha": 8, **lora}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = get_peft_model(model, LoraConfig(**lora), autocast_adapter_dtype=False)
        randomise(trained, 0.1)
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        trained.save_pretrained(folder)
    return folder


def write_wide_base(folder: Path, layers: int, shards: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write only weights, 38 MB in float32 per layer: more than one task each, and enough to kill a merge in time."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(*WIDE, generator=generator).to(dtype)
            for layer in range(shard, layers, shards)
        }
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def write_wide_adapter(folder: Path, layers: int) -> Path:
    """Write an adapter for every layer of such a base, with the training's report."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.up_proj.{part}.weight": torch.randn(shape, generator=generator)
        for layer in range(layers)
        for part, shape in (("lora_A", (8, WIDE[1])), ("lora_B", (WIDE[0], 8)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_account(folder / "report.json", report_of(folder))
    return folder


def peft_merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the merged weights of peft's merge_and_unload, by their names on disk."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def randomise(model: torch.nn.Module, spread: float) -> None:
    """Add a normal random number to every trainable value, so that none keeps its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * spread


def file_names(folder: Path) -> list[str]:
    """Return the names of all files in a folder, as in a manifest."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model's folder, by name."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _save(model: torch.nn.Module, folder: Path, shard_bytes: int) -> Path:
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f'{{"of": "{name}"}}\n')
    return folder


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers, which are in FP8; all else is in bfloat16."""


def in_fp8(folder: Path, block: tuple[int, int] | None, scales: torch.dtype = torch.float32) -> Path:
    """Turn a model's weights into FP8, in place, and return its folder.

    block: the rows and columns that share a scale; None: all of the matrix, whose scale is one number, and a scale for
    the layer's inputs beside it. Each weight's scales go into the next shard: the hub's models have such, too.
    """
    shards = sorted(folder.glob("*.safetensors"))
    made: dict[Path, dict[str, torch.Tensor]] = {shard: {} for shard in shards}
    for shard, after in zip(shards, [*shards[1:], shards[0]], strict=True):
        for name, tensor in load_file(shard).items():
            if name.split(".")[-2] not in LAYERS:
                made[shard][name] = tensor.bfloat16()
                continue
            made[shard][name], made[after][f"{name}_scale_inv"] = quantised(tensor, block, scales)
            if block is None:
                made[after][name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    for shard, tensors in made.items():
        save_file(tensors, shard, {"format": "pt"})
    if len(shards) > 1:
        places = {name: shard.name for shard, tensors in made.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    config = json.loads((folder / CONFIG).read_text()) | {"dtype": "bfloat16"}
    how: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    config["quantization_config"] = how | {"fmt": "e4m3", "weight_block_size": block}
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    return folder


def quantised(
    tensor: torch.Tensor, block: tuple[int, int] | None, scales: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, and its scales."""
    rows, columns = tensor.shape
    high, wide = block or (rows, columns)
    grid = torch.empty(math.ceil(rows / high), math.ceil(columns / wide))
    codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            part = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
            grid[row, column] = (tensor[part].float().abs().max() / 448).to(scales)
            codes[part] = (tensor[part].float() / grid[row, column]).to(torch.float8_e4m3fn)
    return codes, grid.to(scales) if block else grid[0, 0].to(scales)
