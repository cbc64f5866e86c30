"""A mixture of conversations with several pictures, tools, untrained answers and plain texts, from rows to answers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drawn_pictures import drawn, encoded, put
from forked_snakemake import called
from vlmflow.core.account import read_account
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.reports.provenance import Provenance
from vlmflow.rows.stats import Stats
from workflow_runs import ROOT

PUBLISHED = ROOT / "tests" / "published" / "Qwen3-VL-8B-Instruct" / "chat_template.jinja"

TOOL = {"type": "function", "function": {"name": "count", "description": "Count.", "parameters": {"type": "object"}}}

TRAIN = {
    "max_steps": 6,
    "checkpoint_steps": 3,
    "evaluation_steps": 3,
    "learning_rate": 1e-2,
    "max_length": 1024,
    "image_max_tokens": 64,
    "dtype": "float32",
    "gradient_accumulation_steps": 1,
    "dataloader_workers": 0,
}


def picture(folder: Path, number: int) -> str:
    """Write a picture that no other number has; returns its path below `folder`."""
    name = f"shapes/{number}.png"
    if not (folder / name).exists():
        put(folder / name, encoded(drawn(32 + number, 40), "PNG"))
    return name


def dialogue(folder: Path, number: int) -> dict[str, Any]:
    """Return a row: two pictures in a question, one in what a tool returns, and a first answer that is not trained."""
    first, second, third = (picture(folder, 3 * number + place) for place in range(3))
    call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"what": "shapes"}'}}
    return {
        "tools": [TOOL],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"Is {number} in "},
                    {"type": "image", "image": first},
                    {"type": "text", "text": " or in "},
                    {"type": "image", "image": second},
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "assistant", "content": "In both.", "loss": False},
            {"role": "user", "content": "Count them."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image", "image": third}]},
            {"role": "assistant", "content": f"There are {number}."},
        ],
    }


def snakemake(folder: Path, *targets: str) -> tuple[int, str]:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called([*call, "--configfile", str(folder / "mine.yaml"), "--cores", "2", "--", *targets])
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run."""
    folder = tmp_path_factory.mktemp("any")
    words = ["Is it in both? Count the shapes. You may call one or more functions to assist with the user query."]
    write_tiny_model(folder / "tiny", words, TinyShape(merges=64), seed=1)
    (folder / "tiny" / "chat_template.json").write_text(json.dumps({"chat_template": PUBLISHED.read_text()}))
    rows = [dialogue(folder / "pictures", number) for number in range(24)]
    (folder / "shapes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"instruction": f"Say {number}.", "input": "", "output": f"It is {number}."} for number in range(40)]
    (folder / "texts.json").write_text(json.dumps(texts))
    shares = {"val_share": 0.2, "test_share": 0.1}
    mine = {
        "models": {"tiny": {"source": "tiny", "model_type": "qwen3_vl"}},
        "datasets": {
            "shapes": {"kind": "messages", "train": "shapes.jsonl", "image_roots": ["pictures"], **shares},
            "texts": {"kind": "alpaca", "train": "texts.json", **shares},
            "blend": {"mix": {"shapes": "all", "texts": "50%"}},
        },
        "runs": {
            "any": {
                "model": "tiny",
                "dataset": "blend",
                "device": "cpu",
                "processes": 2,
                "train": TRAIN,
                "smoke": {"steps": 4, "longest": 2, "sample": 4},
                "verify": {"rows": 3},
                "evaluate": {"rows": 4, "answers": True},
                "answer": {"rows": 2, "max_tokens": 8},
            }
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    status, said = snakemake(folder, "merged/any", "answers/any/val")
    assert status == 0, said[-6000:]
    return folder


@pytest.mark.slow
def test_rows_of_every_kind_are_trained_and_proven(folder: Path) -> None:
    stats = read_account(folder / "data" / "blend" / "stats.json", Stats)
    assert set(stats.members or {}) == {"shapes", "texts"}
    rows = [json.loads(line) for line in (folder / "data" / "blend" / "train.jsonl").read_text().splitlines()]
    assert {len(row["images"]) for row in rows} == {0, 3}
    speakers = ["human", "gpt", "human", "function_call", "observation", "gpt"]
    (talk,) = {tuple(turn["from"] for turn in row["conversations"]) for row in rows if row["images"]}
    assert list(talk) == speakers
    assert [turn.get("loss") for turn in next(row for row in rows if row["images"])["conversations"]] == [
        *(None, False, None, True, None, True)
    ]
    provenance = read_account(folder / "merged" / "any" / "provenance.json", Provenance)
    assert provenance.verification.logits.verdict == "agree"


@pytest.mark.slow
def test_a_second_picture_that_was_swapped_is_refused(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "data" / "blend" / "train.jsonl").read_text().splitlines()]
    name = next(row for row in rows if row["images"])["images"][1].removeprefix("shapes/")
    put(folder / "pictures" / name, encoded(drawn(99, 40), "PNG"))
    for stage in ("lengths", "fitted"):
        (folder / stage / "any").rename(folder / f"{stage}-before")
    status, said = snakemake(folder, "fitted/any")
    assert status != 0
    assert name in said
    assert "vlmflow refresh-pictures " in said
