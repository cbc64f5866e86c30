"""Trainings of tiny models with the real trainer, on rows without or with pictures; one is killed, and resumes."""

import json
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import psutil
from PIL import Image
from transformers import AutoTokenizer

from made_rows import made_row
from tiny_models import file_names
from trainer_faults import passes
from vlmflow.config.run_settings import QuantisationSettings, TrainSettings
from vlmflow.config.strategies import DDP, LORA, Strategy, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.in_trainer.messages import Log, read_events, rows_of_step
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.count import RowLength, TokenCounter
from vlmflow.merging.logits import inputs_of
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.proof import LogitProof, TensorProof
from vlmflow.merging.verify_logits import verify_logits, verify_stored_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.pictures.manifest import PictureEntry
from vlmflow.rows.chat import IMAGE_TAG, Turn
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import release
from vlmflow.supervisor.train import Trained, train
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.swift.chat_form import ChatForm
from workflow_runs import words_of

WORDS = ("red", "green", "blue", "one", "two", "three")
PICTURES = ("red", "green", "blue")
IMAGE_MAX_TOKENS = 16

QUICK = {
    "learning_rate": 1e-2,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "dataloader_workers": 0,
    "dtype": "float32",
    "image_max_tokens": IMAGE_MAX_TOKENS,
}
"""Settings for few and quick steps."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model and its rows in a folder. vision: a Qwen3-VL, whose rows have pictures; otherwise a Qwen3."""

    folder: Path
    vision: bool

    @classmethod
    def write(
        cls, folder: Path, vision: bool, rows: int = 12, val_rows: int = 4, mixed: bool = False, longest: int = 5
    ) -> "Tiny":
        """Write model, pictures, rows and their lengths. mixed: every other row has no picture. longest: in words."""
        write_tiny_model(folder / "base", WORDS, TinyShape(), seed=1, vision=vision)
        (folder / "pictures").mkdir()
        for colour in PICTURES:
            Image.new("RGB", (96, 64), colour).save(folder / "pictures" / f"{colour}.png")
        sized = [PictureEntry(path="", rows=1, name=f"{one}.png", sha256="", width=96, height=64) for one in PICTURES]
        form = ChatForm.of({} if vision else {"template": "qwen3"}, last_answer_only=False)
        counter = TokenCounter(folder / "base", sized if vision else [], IMAGE_MAX_TOKENS, form)
        for split, count in (("train", rows), ("val", val_rows)):
            pictured = [vision and not (mixed and number % 2) for number in range(count)]
            made = [_row(number, has, longest) for number, has in enumerate(pictured)]
            lines = [json.dumps(row).encode() for row in made]
            (folder / f"{split}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
            begins = [0, *accumulate(len(line) + 1 for line in lines)]
            counts = counter.count([_typed(row) for row in made])
            lengths = [
                RowLength("row", begin, begin + len(line), *count)
                for begin, line, count in zip(begins, lines, counts, strict=False)
            ]
            encoded = b"".join(msgspec.json.encode(length) + b"\n" for length in lengths)
            (folder / f"{split}.lengths.jsonl").write_bytes(encoded)
        return cls(folder, vision)

    def training(self, tuner: Tuner = LORA, strategy: Strategy = DDP, processes: int = 1, **settings: Any) -> Training:
        """Return a training of the model. settings: those that differ from QUICK."""
        values = QUICK | ({} if self.vision else {"swift_args": {"template": "qwen3"}}) | settings
        pictures = self.folder / "pictures"
        rows = self.folder / "train.jsonl", self.folder / "val.jsonl"
        data = TrainingData(*rows, pictures, "digest", last_answer_only=False, one_sequence=True)
        base = BaseModel(self.folder / "base", "qwen3_vl" if self.vision else "qwen3", "digest")
        return Training(data, base, TrainSettings(**values), "cpu", processes, strategy, tuner)

    def merged(self, trained: Trained, training: Training, name: str) -> tuple[TensorProof, LogitProof]:
        """Release, merge and verify the best checkpoint as the stages do, and return both proofs."""
        place = self.folder / name
        (place / "full").mkdir(parents=True)
        base, tuner = self.folder / "base", training.tuner
        release(trained.best.folder, place / "full", tuner)
        merge_weights(base, place / "full", place / "merged", file_names(base), 2)
        tensors = verify_tensors(base, place / "full", place / "merged", file_names(base), 2, tuner)
        settings = training.settings
        if not tuner.trains_adapter:
            return tensors, verify_stored_logits(base, place / "full", place / "merged", "cpu", settings.dtype)
        rows = [_typed(_row(number, self.vision)) for number in range(2)]
        quantisation = QuantisationSettings() if tuner.quantises else None
        arguments = template_arguments(base, training.model.model_type, "default", settings.text_args)
        inputs = inputs_of(rows, arguments, self.folder / "pictures", settings.image_max_tokens)
        return tensors, verify_logits(
            base, place / "full", place / "merged", inputs, "cpu", settings.dtype, quantisation
        )


def _row(number: int, vision: bool, longest: int = 5) -> dict[str, Any]:
    words = (WORDS[:5] * longest)[: 1 + number * 7 % longest] if longest > 5 else WORDS[: 1 + number % 5]
    colour, answer = PICTURES[number % 3], " ".join(words)
    question = f"{IMAGE_TAG}\n{colour}" if vision else colour
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **({"images": [f"{colour}.png"]} if vision else {})}


def _typed(row: dict[str, Any]) -> ShareGptRow:
    turns = [Turn(turn["from"], turn["value"]) for turn in row["conversations"]]
    return made_row("row", turns, images=row.get("images", []))


def losses_of(training: Training, runs: Path) -> list[tuple[int, float]]:
    """Return the steps and losses that all sessions of a training logged, one after the other."""
    progress = runs / training.digest() / "progress.jsonl"
    events = [event for event in read_events(progress) if isinstance(event, Log)]
    return [(event.step, event.loss) for event in events if isinstance(event.loss, float)]


def train_and_kill(training: Training, runs: Path, step: int) -> None:
    """Train until `step` is logged; then SIGKILL all trainers, as when their machine loses power."""
    over = threading.Event()
    me = psutil.Process()

    def kill() -> None:
        while not over.is_set():
            if any(logged >= step for logged, _ in losses_of(training, runs)):
                (torchrun,) = (child for child in me.children() if "torch.distributed.run" in words_of(child))
                for process in [torchrun, *torchrun.children(recursive=True)]:
                    process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        train(training, runs, 2, "train_model r")
    except VlmflowError:
        return
    finally:
        over.set()
        killer.join()
    raise AssertionError("the training ended before it could be killed")


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
