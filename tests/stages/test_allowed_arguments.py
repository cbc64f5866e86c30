"""Arguments that a run may pass on to ms-swift change neither what the model reads nor which tokens are trained."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlmflow.config.swift_args import ALLOWED, SET_BY_THE_WORKFLOW, names
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment

CHANGED: dict[str, Any] = {
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 1e-3,
    "aligner_lr": 1e-3,
    "vit_lr": 1e-3,
    "lorap_lr_ratio": 2.0,
    "lr_scheduler_kwargs": "{}",
    "max_grad_norm": 0.5,
    "neftune_noise_alpha": 5.0,
    "optim": "sgd",
    "optim_args": "a=1",
    "init_weights": "gaussian",
    "lora_bias": "all",
    "modules_to_save": "lm_head",
    "target_regex": "q_proj",
    "freeze_parameters": "visual",
    "freeze_parameters_ratio": 0.5,
    "freeze_parameters_regex": "visual",
    "trainable_parameters": "lm_head",
    "trainable_parameters_regex": "lm_head",
    "bnb_4bit_quant_storage": "bfloat16",
    "experts_impl": "eager",
    "tf32": False,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 3,
    "dataset_num_proc": 2,
    "lazy_tokenize": False,
    "load_from_cache_file": True,
    "ddp_broadcast_buffers": True,
    "ddp_bucket_cap_mb": 5,
    "ddp_find_unused_parameters": True,
    "ddp_static_graph": True,
    "full_determinism": True,
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "vit_gradient_checkpointing": False,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "torch_empty_cache_steps": 3,
    "use_cache": True,
    "use_logits_to_keep": True,
    "disable_tqdm": True,
    "log_level": "error",
    "log_level_replica": "error",
    "log_on_each_node": False,
    "run_name": "r",
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "skip_memory_metrics": False,
}
"""Of each allowed argument a value other than ms-swift's."""

ENCODE = """
import json, sys
from vlmflow.swift.own_template import encode_as_in_training
encode_as_in_training()
from swift.arguments import SftArguments
from swift import dataset
from swift.utils import parse_args

rows, *words = sys.argv[1:]
for more in json.load(sys.stdin):
    arguments, unknown = parse_args(SftArguments, [*words, *more])
    assert not unknown, unknown
    template = arguments.get_template()
    template.set_mode("train")
    encoded = [template.encode(row) for row in dataset.load_dataset([rows], strict=True)[0]]
    read = [[list(row["input_ids"]), list(row["labels"]), float(row["pixel_values"].double().sum())] for row in encoded]
    print("READ", json.dumps(read))
"""


def encoded(model: Path, rows: Path, pictures: Path, scratch: Path, given: list[dict[str, Any]]) -> list[Any]:
    """Return what ms-swift makes of rows with each of some arguments, as in a training: tokens, labels, pixels."""
    ours = {"model": model, "model_type": "qwen3_vl", "dataset": rows, "output_dir": scratch / "out", "use_cpu": True}
    words = as_words({**ours, "add_version": False, "check_model": False, "load_args": False, "report_to": "none"})
    each = json.dumps([as_words(more) for more in given])
    env = environment(pictures, 64, scratch / "cache", 2)
    call = [sys.executable, "-c", ENCODE, str(rows), *words]
    done = subprocess.run(call, input=each, env=env, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return [json.loads(line.removeprefix("READ ")) for line in done.stdout.splitlines() if line.startswith("READ ")]


@pytest.fixture
def rows(demo_run: Path, tmp_path: Path) -> Path:
    lines = (demo_run / "data" / "fire" / "val.jsonl").read_text().splitlines(keepends=True)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(lines[:3]))
    return file


def test_each_is_an_argument_of_ms_swift_with_a_value() -> None:
    assert CHANGED.keys() == ALLOWED
    assert set(names()["arguments"]) >= ALLOWED
    assert not ALLOWED & SET_BY_THE_WORKFLOW.keys()


def test_all_together_change_nothing(demo_run: Path, rows: Path, tmp_path: Path) -> None:
    """And an argument that is refused does: the comparison sees it."""
    pictures = demo_run / "stores" / "pictures" / "fire"
    given = [{}, CHANGED, {"max_pixels": 2_000}, {"template_backend": "jinja"}]
    plain, changed, pixels, jinja = encoded(demo_run / "tiny-model", rows, pictures, tmp_path, given)
    assert changed == plain
    assert pixels != plain
    assert [row[1] for row in jinja] != [row[1] for row in plain]


@pytest.mark.slow
def test_each_alone_changes_nothing(demo_run: Path, rows: Path, tmp_path: Path) -> None:
    pictures = demo_run / "stores" / "pictures" / "fire"
    given = [{}, *({name: value} for name, value in CHANGED.items())]
    plain, *each = encoded(demo_run / "tiny-model", rows, pictures, tmp_path, given)
    assert [name for name, read in zip(CHANGED, each, strict=True) if read != plain] == []
