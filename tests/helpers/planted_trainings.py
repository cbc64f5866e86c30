"""Trainings of models that can learn one thing alone, and what the evaluation says of each.

A row is a question, a wrong answer, feedback, and the right answer with a code. The kinds of rows differ in what tells
the code: the feedback, the question, the picture, several of them together, or nothing.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from made_rows import made_row
from simulated_evaluations import choose_rows
from text_run import SWIFT_ARGS
from vlmflow.config.after_training import EvaluateSettings
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP, FULL
from vlmflow.core.files import sha256_of
from vlmflow.demo.tiny_model import write_tokenizer
from vlmflow.evaluation.margins import margin_report
from vlmflow.evaluation.measure import Measurement, ScoredModel, evaluated_rows, scorer
from vlmflow.evaluation.report import MarginReport
from vlmflow.merging.merge import merge_weights
from vlmflow.rows.chat import FIRST_LINE, Turn
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import release
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import BaseModel, Training

FEEDBACK, PICTURE, TOPIC, FORM = "feedback", "picture", "topic", "form"
RELATE, ECHO, KEYWORD, NEXT, EXCLUDE = "relate", "echo", "keyword", "next", "exclude"
"""What the rows of a kind teach.

feedback: to repeat the code in the feedback. picture: to read the code in the picture. topic: that answers, right and
wrong, repeat words of the feedback, in which the code is not. form: that right answers have another form than wrong
ones. relate: codes stand in a ring, and the feedback says how far the right one is from the wrong one. echo: right
answers begin with the first word of their feedback, wrong ones with another word, and nothing tells the code. keyword:
a keyword of the question tells the code; the feedback repeats it. next: the right code is the one after the wrong one.
exclude: the question has two codes, and the right one is that which the wrong answer did not say. Only relate teaches
to use feedback without repeating it.
"""

CODES = ["".join(letters) for letters in product("bdfgklmnprstvwyz", "aeiu")]
"""Each is one token. In feedback it has a line of its own: after a space it would be another token than in answers."""

COLOURS = [(220, 40, 40), (40, 220, 40), (40, 40, 220), (220, 220, 40)]
"""Of the pictures, each with its code."""

WORDS = [
    *("above", "below", "board", "chair", "cloud", "cold", "dark", "door", "field", "first", "glass", "green", "hand"),
    *("house", "large", "last", "light", "long", "many", "moon", "near", "north", "open", "paper", "place", "quiet"),
    *("red", "river", "round", "sharp", "small", "stone", "table", "tall", "tree", "warm", "white"),
]

VOCABULARY, MERGES = 512, 230
"""Tokens of a text model: 256 bytes, 26 added ones, and the merges. Qwen's 151,936 make a step eight times as slow."""

VAL = 200
"""The rows of val: all must have a question of their own, and a verdict needs 100."""

RING = 8
"""Codes of `relate` and `next`, in a ring, and of `exclude`."""

STEPS = {"up": 1, "over": 2, "down": -1, "under": -2}
"""How far the right code of `relate` is from the wrong one, by the word in the feedback. With two words alone, more of
its donors would have the same one: they are the rows with the most words in common."""
KEYWORDS = 24
"""Of `keyword`, each with a code."""

TRAIN = {
    "checkpoint_steps": 1_000,
    "evaluation_steps": 1_000,
    "lr_scheduler": "constant_with_warmup",  # cosine needs more steps with some seeds
    "warmup_ratio": 0.15,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "dtype": "float32",
    "max_length": 128,
    "dataloader_workers": 0,
    "image_max_tokens": 4,
}

TEXT = TRAIN | {"per_device_batch_size": 32, "learning_rate": 3e-3, "swift_args": SWIFT_ARGS}

HOW: dict[str, dict[str, Any]] = {
    FEEDBACK: TEXT | {"max_steps": 120},
    TOPIC: TEXT | {"max_steps": 60},
    FORM: TEXT | {"max_steps": 30},
    RELATE: TEXT | {"max_steps": 150},
    ECHO: TEXT | {"max_steps": 260},
    KEYWORD: TEXT | {"max_steps": 90},
    NEXT: TEXT | {"max_steps": 90},
    EXCLUDE: TEXT | {"max_steps": 150},
    PICTURE: TRAIN
    | {"max_steps": 200, "per_device_batch_size": 1, "gradient_accumulation_steps": 4, "learning_rate": 3e-3},
}
"""How each kind is trained. Qwen3-VL's tokens have fixed numbers, so its model has them all, and logits cost most."""


@dataclass(frozen=True)
class Planted:
    """The rows of a kind, and how a model is trained on them. pictures: their folder."""

    kind: str
    rows: list[ShareGptRow]
    pictures: Path
    settings: TrainSettings

    @property
    def train(self) -> list[ShareGptRow]:
        """The rows to train: one epoch of the steps."""
        return self.rows[:-VAL]

    @property
    def val(self) -> list[ShareGptRow]:
        """The rows to evaluate."""
        return self.rows[-VAL:]


def planted(kind: str, folder: Path, seed: int = 1) -> Planted:
    """Make the rows of a kind, and their pictures. seed: of the rows and of the training."""
    settings = TrainSettings(**HOW[kind], seed=seed)
    draw = random.Random(seed)
    count = settings.max_steps * settings.per_device_batch_size * settings.gradient_accumulation_steps + VAL
    rows = [_row(kind, number, draw, folder) for number in range(count)]
    return Planted(kind, rows, folder, settings)


def _row(kind: str, number: int, draw: random.Random, folder: Path) -> ShareGptRow:
    question = " ".join(draw.choices(WORDS, k=draw.randint(3, 6))) + "?"
    words = [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(2)]
    right, wrong = draw.sample(CODES[: len(COLOURS)] if kind == PICTURE else CODES, 2)
    held = right if kind == FEEDBACK else "so"
    before = {TOPIC: f"{words[0]}\n", FORM: "it is\n", ECHO: f"{words[0].split()[0]}\n"}.get(kind, "")
    before_wrong = {FORM: "", ECHO: f"{draw.choice(WORDS)}\n"}.get(kind, before)
    if kind in (RELATE, NEXT):
        held, place = draw.choice(list(STEPS)), draw.randrange(RING)
        wrong, right = CODES[place], CODES[(place + (STEPS[held] if kind == RELATE else 1)) % RING]
    if kind == EXCLUDE:
        right, wrong = draw.sample(CODES[:RING], 2)
        question = "\n".join([question, *draw.sample([right, wrong], 2)])
    if kind == KEYWORD:
        place = draw.randrange(KEYWORDS)
        held, right = WORDS[place], CODES[place]
        wrong = draw.choice([code for code in CODES[:KEYWORDS] if code != right])
        question = f"{held} {' '.join(draw.choices(WORDS[KEYWORDS:], k=4))}?"
        words = [" ".join(draw.choices(WORDS[KEYWORDS:], k=2)) for _ in range(2)]
    images = []
    if kind == PICTURE:
        images, question = [f"{number}.png"], FIRST_LINE + question
        colour = COLOURS[CODES.index(right)]
        Image.new("RGB", (32, 32), tuple(part + draw.randint(-20, 20) for part in colour)).save(folder / images[0])
    turns = [
        Turn("human", question),
        Turn("gpt", before_wrong + wrong),
        Turn("human", f"{words[0]}\n{held}\n{words[1]}"),
        Turn("gpt", before + right),
    ]
    return made_row(f"row-{number}", turns, "planted", images, [3, 10])


def write_model(folder: Path, made: Planted) -> BaseModel:
    """Write an untrained base for the rows, with a tokenizer that is learned from them."""
    texts = [turn.value for row in made.rows for turn in row.conversations]
    if made.kind == PICTURE:
        from vlmflow.demo.tiny_model import TinyShape, write_tiny_model  # which imports torch

        write_tiny_model(folder, texts, TinyShape(hidden_size=64), 1)
        return BaseModel(folder, "qwen3_vl", "digest")
    _write_text_model(folder, texts)
    return BaseModel(folder, "qwen3", "digest")


def _write_text_model(folder: Path, texts: Iterable[str]) -> None:
    """Write an untrained Qwen3 with 460,000 weights, and a tokenizer that is learned from the texts."""
    from tiny_models import write_base  # which imports torch

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    write_base(folder, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, **heads)
    (folder / "chat_template.jinja").unlink()  # tokenizer_config.json has the template
    vocabulary = write_tokenizer(folder, [*texts, *["user\n", "assistant\n", *CODES] * 1000], MERGES, gap=False)
    assert max(vocabulary.values()) < VOCABULARY
    assert set(CODES) <= vocabulary.keys()
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": vocabulary["<|im_end|>"], "pad_token_id": vocabulary["<|endoftext|>"]}
    (folder / "config.json").write_text(json.dumps(config))


def report_of_training(kind: str, folder: Path, seed: int = 1) -> MarginReport:
    """Train on the rows of a kind by the workflow's own trainer, and compare the merged model with its base on val."""
    (folder / "pictures").mkdir()
    made = planted(kind, folder / "pictures", seed)
    base = write_model(folder / "base", made)
    for name in ("train", "val"):
        lines = [msgspec.json.encode(_line(row)) for row in getattr(made, name)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    data = TrainingData(folder / "train.jsonl", folder / "val.jsonl", made.pictures, made.kind, last_answer_only=True)
    training = Training(data, base, made.settings, "cpu", 1, DDP, FULL)
    trained = train(training, folder / "runs", 1, made.kind)
    (folder / "full").mkdir()
    release(trained.last.folder, folder / "full", FULL)
    files = [file.name for file in base.folder.iterdir()]
    merge_weights(base.folder, folder / "full", folder / "merged", files, 1)
    how = Measurement(
        model_type=base.model_type,
        text_args=made.settings.text_args,
        loss_scale="last_round",
        pictures=made.pictures,
        image_max_tokens=made.settings.image_max_tokens,
        max_length=made.settings.max_length,
        device="cpu",
        dtype="float32",
        processes=1,
        threads=1,
    )
    of_base, of_tuned = (
        scorer(ScoredModel(name, place, name), how, folder / "losses")
        for name, place in (("base", base.folder), ("tuned", folder / "merged"))
    )
    digests = {name: sha256_of(made.pictures / name) for row in made.val for name in row.images}
    chosen, out = choose_rows(made.val, digests, neutral=EvaluateSettings().neutral_feedback)
    assert len(out) < VAL / 10, out
    found, too_long = evaluated_rows(chosen, of_base, of_tuned)
    assert too_long == []
    return margin_report(found)


def _line(row: ShareGptRow) -> dict[str, Any]:
    line: dict[str, Any] = msgspec.to_builtins(row)
    return line
