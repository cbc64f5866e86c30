"""Two runs that a measure of feedback's use must tell apart: one can learn to copy from the feedback, one cannot.

A row is a question, a wrong code, feedback that holds a code, and the right code. The runs differ in the feedback
alone: in `real` it holds the row's right code, which is nowhere else in the prompt; in `shuffled` these codes are
dealt to the rows at random.
"""

import json
import random
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from forked_snakemake import called
from text_run import SWIFT_ARGS
from vlmflow.demo.tiny_tokenizer import FIRST_SPECIAL_ID, write_tokenizer
from workflow_runs import ROOT

RUNS = ("real", "shuffled")

CODES = ["".join(letters) for letters in product("bdfgklmnprstvwyz", "aeiu")]
"""Each is one token. In feedback it has a line of its own: after a space it would be another token than in answers."""

WORDS = [
    *("above", "below", "board", "chair", "cloud", "cold", "dark", "door", "field", "first", "glass", "green", "hand"),
    *("house", "large", "last", "light", "long", "many", "moon", "near", "north", "open", "paper", "place", "quiet"),
    *("red", "river", "round", "sharp", "small", "stone", "table", "tall", "tree", "warm", "white"),
]

VOCABULARY, MERGES = 512, 230
"""Tokens of the model: 256 bytes, 26 added ones, and the merges. With Qwen's 151,936 a training takes 76 s, not 10."""

ROWS = {"train": 6_400, "val": 100, "test": 100}
"""The rows of each split: train is one epoch of TRAIN's steps."""

TRAIN = {
    "max_steps": 200,
    "checkpoint_steps": 200,
    "evaluation_steps": 200,
    "learning_rate": 3e-3,
    "lr_scheduler": "constant_with_warmup",  # cosine needs more steps with some seeds
    "warmup_ratio": 0.15,
    "per_device_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "dtype": "float32",
    "max_length": 128,
    "dataloader_workers": 0,
    "swift_args": SWIFT_ARGS,
}

SIDE_BY_SIDE = [
    f"{rule}=1" for rule in ("measure_lengths", "merge_weights", "verify_tensors", "verify_merged", "evaluate")
]
"""The rules that would take both cores, and are as fast on one: so the jobs of both runs are beside each other."""


def planted_rows(shuffled: bool) -> list[dict[str, Any]]:
    """Return the rows of all splits in ShareGPT's form; those that are shuffled differ in their feedback alone."""
    draw = random.Random(1)
    count = sum(ROWS.values())
    right = [draw.choice(CODES) for _ in range(count)]
    wrong = [draw.choice([code for code in CODES if code != own]) for own in right]
    questions = [" ".join(draw.choices(WORDS, k=draw.randint(3, 6))) + "?" for _ in range(count)]
    around = [[" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(2)] for _ in range(count)]
    held = draw.sample(right, count) if shuffled else right  # as often each code, but in another order
    return [
        {
            "source": "planted",
            "conversations": [
                {"from": "human", "value": questions[number]},
                {"from": "gpt", "value": wrong[number]},
                {"from": "human", "value": "\n".join([around[number][0], held[number], around[number][1]])},
                {"from": "gpt", "value": right[number]},
            ],
        }
        for number in range(count)
    ]


def write_model(folder: Path, texts: Iterable[str]) -> None:
    """Write an untrained Qwen3 with 460,000 weights, and a tokenizer that is learned from the texts."""
    from tiny_models import write_base  # which imports torch

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    write_base(folder, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, **heads)
    (folder / "chat_template.jinja").unlink()  # tokenizer_config.json has the template
    write_tokenizer(folder, [*texts, *["user\n", "assistant\n"] * 1000], MERGES)
    vocabulary = _without_gap(folder / "tokenizer.json")
    assert max(vocabulary.values()) < VOCABULARY
    assert set(CODES) <= vocabulary.keys()
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": vocabulary["<|im_end|>"], "pad_token_id": vocabulary["<|endoftext|>"]}
    (folder / "config.json").write_text(json.dumps(config))


def _without_gap(tokenizer: Path) -> dict[str, int]:
    """Give the added tokens the ids after those of the merges instead of Qwen's, and return the id of every token."""
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    gap = FIRST_SPECIAL_ID - sum(number < FIRST_SPECIAL_ID for number in vocabulary.values())
    content["model"]["vocab"] = {
        token: number - gap if number >= FIRST_SPECIAL_ID else number for token, number in vocabulary.items()
    }
    for added in content["added_tokens"]:
        added["id"] -= gap
    tokenizer.write_text(json.dumps(content))
    return content["model"]["vocab"]


def train_on_planted_feedback(folder: Path) -> str:
    """Make `verified/RUN` of the model in `base`, and `eval/RUN/val`, for both runs; return what Snakemake printed."""
    rows = {run: planted_rows(run == "shuffled") for run in RUNS}
    for run in RUNS:
        (folder / f"{run}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[run]))
    write_model(folder / "base", (turn["value"] for row in rows["real"] for turn in row["conversations"]))
    count = sum(ROWS.values())
    settings = {
        "models": {"planted": {"source": "base", "model_type": "qwen3"}},
        "datasets": {
            run: {
                "kind": "sharegpt",
                "modality": "text",
                "train": f"{run}.jsonl",
                "test_share": ROWS["test"] / count,
                "val_share": ROWS["val"] / (count - ROWS["test"]),
            }
            for run in RUNS
        },
        "runs": {
            run: {
                "model": "planted",
                "dataset": run,
                "device": "cpu",
                "tuner": "full",
                "train": TRAIN,
                "smoke": {"steps": 8},
                "evaluate": {"feedback": True},
            }
            for run in RUNS
        },
    }
    (folder / "planted.yaml").write_text(yaml.safe_dump(settings))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    files = ["--configfile", str(folder / "planted.yaml"), "--cores", "2", "--set-threads", *SIDE_BY_SIDE, "--"]
    done = called([*call, *files, *[f"eval/{run}/val" for run in RUNS]])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said
