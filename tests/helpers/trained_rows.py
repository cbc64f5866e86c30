"""Compares the rows that a run folder names for its steps with what its trainers really trained on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tiny_trainings import Tiny
from trainer_faults import passes
from vlmflow.in_trainer.messages import rows_of_step


def check_rows(folder: Path, run_folder: Path, tiny: Tiny, steps: Iterable[int], ranks: int) -> None:
    """Compare each step's rows, rank by rank and pass by pass. folder: that of `make_fault`.

    Each row of a tiny training has another question or another answer.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder / "base")
    rows = [json.loads(line) for line in (tiny.folder / "train.jsonl").read_text().splitlines()]
    texts = ["".join(turn["value"] for turn in row["conversations"]) for row in rows]
    assert len(set(texts)) == len(texts)
    for step in steps:
        named = rows_of_step(run_folder, step)
        assert sorted(named) == list(range(ranks))
        for rank, batches in named.items():
            made = [one for one in passes(folder, "trained", rank) if one.step == step][-len(batches) :]
            trained = [[_text(tokenizer, ids) for ids in one.tokens] for one in made]
            assert [[texts[row] for row in batch] for batch in batches] == trained, f"step {step}, rank {rank}"


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Return question and answer of a row from its tokens, without the chat's marks and padding."""
    marked = tokenizer.decode(ids).replace("<think>\n\n</think>", "")
    turns = [turn.partition("\n") for turn in marked.replace("<|im_end|>", "<|im_start|>").split("<|im_start|>")]
    return "".join(text.strip() for role, _, text in turns if role in ("user", "assistant"))
