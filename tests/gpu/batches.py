"""The sample's valid rows, and the batches of them that a model reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from transformers import AutoProcessor

from vlmflow.core.files import read_json
from vlmflow.demo.sample import FAULTS_FILE, PICTURES, TRAIN_FILE
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.trajectories import trajectory_row

ANSWER_BEGINS = "<|im_start|>assistant\n"
ANSWER_ENDS = "<|im_end|>"


@dataclass(frozen=True)
class RowSize:
    """One row's tokens, including picture tokens; how many are trained; patches of its picture."""

    tokens: int
    trained: int
    patches: int


@dataclass(frozen=True)
class Batch:
    """Rows as a model reads them.

    inputs: the output of the model's processor, padded on the right: token ids are rows × positions.
    before: indices in the flattened rows × positions that precede a trained token. targets: these tokens.
    sizes: of the rows.
    """

    inputs: dict[str, torch.Tensor]
    before: torch.Tensor
    targets: torch.Tensor
    sizes: list[RowSize]

    @property
    def positions(self) -> int:
        """Positions that the model computes, including padding."""
        return self.inputs["input_ids"].numel()

    def to(self, device: str) -> Self:
        """Return the same batch on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, before=self.before.to(device), targets=self.targets.to(device))


def sound_rows(sample: Path) -> list[ShareGptRow]:
    """Return the train rows of a generated sample in the trajectory form, without those broken on purpose."""
    broken = {fault["row"] for fault in read_json(sample / FAULTS_FILE) if fault["split"] == "train"}
    rows = []
    with JsonRows(sample / TRAIN_FILE) as raw:
        for number, row in enumerate(raw):
            trajectory = read_trajectory(row)
            if number not in broken and not isinstance(trajectory, Reject):
                rows.append(trajectory_row(row_id("train", number, row), trajectory))
    return rows


def batches(rows: Sequence[ShareGptRow], sample: Path, model: Path, size: int) -> list[Batch]:
    """Cut rows into batches of `size`, with the processor in `model`; the last may be smaller."""
    processor = AutoProcessor.from_pretrained(model)
    return [_batch(rows[first : first + size], sample / PICTURES, processor) for first in range(0, len(rows), size)]


def _batch(rows: Sequence[ShareGptRow], pictures: Path, processor: Any) -> Batch:
    texts = [ChatForm().text(row) for row in rows]
    images = [[Image.open(pictures / name).convert("RGB") for name in row.images] for row in rows]
    inputs = dict(processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"))
    trained = _trained(inputs["input_ids"], processor.tokenizer)
    before = torch.nn.functional.pad(trained[:, 1:], (0, 1))
    counts = zip(
        inputs["attention_mask"].sum(dim=1).tolist(),
        before.sum(dim=1).tolist(),
        inputs["image_grid_thw"].prod(dim=1).tolist(),
        strict=True,
    )
    return Batch(
        inputs=inputs,
        before=before.flatten().nonzero().squeeze(1),
        targets=inputs["input_ids"].roll(-1, dims=1)[before],
        sizes=[RowSize(*count) for count in counts],
    )


def _trained(ids: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Mark the tokens of the answers and of their ends: rows × positions, true or false."""
    begin = tokenizer.encode(ANSWER_BEGINS)
    end = tokenizer.convert_tokens_to_ids(ANSWER_ENDS)
    trained = torch.zeros_like(ids, dtype=torch.bool)
    for row, marks in zip(ids.tolist(), trained, strict=True):
        for place in range(len(row)):
            if row[place : place + len(begin)] == begin:
                marks[place + len(begin) : row.index(end, place) + 1] = True
    return trained
