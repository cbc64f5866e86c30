"""The conversations whose last answers are scored: what a row becomes for the models.

Measures the losses of rows with one model: in several processes, each with its share of the rows and GPUs.
"""

import importlib.metadata
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.processes import bound_to_this_process
from vlmflow.core.progress import Progress
from vlmflow.evaluation import answer_losses
from vlmflow.evaluation.answer_losses import HowToMeasure, Measured, Pass, Work
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.report import OTHER, OTHER_PICTURE, OWN, QUESTION, KeptLines, Loss, Margin
from vlmflow.evaluation.scoring.stated import answer_in
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.pictures.budget import PictureBudget
from vlmflow.rows.chat import Turn, after_mark, tags_in, without_tags
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment, failed, gpu_products, visible_gpus

RIGHT, WRONG = "right", "wrong"

BEGINNING = "Answer:"
"""Where answers have a thought before this mark, all that is scored begins with it: the thought was written after the
feedback was read, and speaks of it."""


def passes_of(case: Case, donor: Case | None, picture_donor: Case | None) -> dict[str, Pass]:
    """Return the conversations of a row, by context and answer (`margins_of`).

    donor: the row whose feedback is the control, with as many turns of it, without its pictures; None in a data set
    without feedback.
    picture_donor: the row whose pictures are the control, with as many; None if there is none.
    """
    contexts = {QUESTION: case.turns[:-1]} if donor is None else {QUESTION: case.turns[:1], OWN: case.turns[:-1]}
    if donor is not None:
        contexts[OTHER] = list(case.turns[:-1])
        others = donor.turns[2 : len(case.turns) - 1 : 2]
        contexts[OTHER][2::2] = [Turn(turn.speaker, without_tags(turn.value)) for turn in others]
    pictures = dict.fromkeys(contexts, case.row.images)
    if picture_donor is not None:
        contexts[OTHER_PICTURE] = contexts[QUESTION] if donor is None else contexts[OWN]
        pictures[OTHER_PICTURE] = picture_donor.row.images
    answers = {RIGHT: case.turns[-1]} if donor is None else scored_answers(case)
    given = BEGINNING if donor is not None and answers[RIGHT].value.startswith(BEGINNING) else ""
    if donor is not None:  # what the training left out of the loss is history like all else
        contexts = {each: [Turn(turn.speaker, turn.value) for turn in turns] for each, turns in contexts.items()}
    return {
        f"{context} {which}": Pass(
            [*case.system, *before, answer], pictures[context][: tags_in(before)], given, case.row.tools or UNSET
        )
        for context, before in contexts.items()
        for which, answer in answers.items()
    }


def scored_answers(case: Case) -> dict[str, Turn]:
    """Return the right and the wrong answer of a row with feedback, without thoughts, in the same form."""
    texts = {RIGHT: case.answer} | ({} if case.wrong is None else {WRONG: case.wrong})
    marked = all(after_mark(text) is not None for text in texts.values())
    begins = f"{BEGINNING} " if marked else ""
    return {which: Turn("gpt", begins + (answer_in(text) or text)) for which, text in texts.items()}


def margins_of(losses: dict[str, Loss]) -> dict[str, Margin]:
    """Return the margins by context. losses: by the names of `passes_of`."""
    contexts = dict.fromkeys(name.split()[0] for name in losses)
    return {each: Margin(losses[f"{each} {RIGHT}"], losses.get(f"{each} {WRONG}")) for each in contexts}


log = logging.getLogger("vlmflow")

PACKAGES = ("torch", "transformers", "ms-swift")
"""Packages whose versions may change a loss."""

MEASURING = 3
"""The way in which losses are measured. Kept losses belong to it: raise it whenever a change of this code or of
`answer_losses` may change a loss of the same conversation."""

TOGETHER = {"cuda": 16_384, "cpu": 0}
"""Tokens of a row's conversations in one forward pass (`HowToMeasure.together`)."""

SPARE = 1.2
"""A model on one GPU needs this much of the size of its weights: activations and logits of one row come on top."""


@dataclass(frozen=True)
class ScoredModel:
    """A model to measure. name: for the progress. folder: its files. digest: that of the files."""

    name: str
    folder: Path
    digest: str


@dataclass(frozen=True)
class Measurement:
    """How all models are measured.

    model_type, text_args: as in training. loss_scale: which answers are scored, as ms-swift names it. pictures: the
    store of the rows' pictures. processes: trainers of the run, which is the number of GPUs on cuda. threads: cores for
    all processes. The others are settings of the run.
    """

    model_type: str
    text_args: Mapping[str, Any]
    loss_scale: str
    pictures: Path
    image_max_tokens: int
    max_length: int
    device: str
    dtype: str
    processes: int
    threads: int

    def meaning(self, model: ScoredModel) -> dict[str, Any]:
        """Return everything but the rows that determines a model's losses; kernels differ between GPU products."""
        limits = PictureBudget.of(model.folder, self.image_max_tokens).left_to_processor
        return {
            "model": model.digest,
            "model_type": self.model_type,
            "text_args": dict(self.text_args),
            "loss_scale": self.loss_scale,
            "image_max_tokens": self.image_max_tokens,
            "max_length": self.max_length,
            "device": self.device,
            "gpus": gpu_products() if self.device == "cuda" else [],
            "dtype": self.dtype,
            "versions": versions(),
            "measuring": MEASURING,
            **({"picture_limits": limits} if limits else {}),
            **({"together": TOGETHER[self.device]} if TOGETHER[self.device] else {}),
        }


def versions() -> dict[str, str]:
    """Return the versions of packages that may change a loss."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


class ModelScorer:
    """Measures rows with one model; logs how many of them were measured now, and not in the store."""

    def __init__(self, model: ScoredModel, how: Measurement, store: Path) -> None:
        self._model, self._how, self._store = model, how, store

    def __call__(self, rows: Sequence[Work]) -> Mapping[str, Measured]:
        """Return the losses by the works' keys."""
        found, new = measure(self._model, rows, self._how, self._store)
        log.info(f"losses of {self._model.name}: {new} of {len(rows)} rows were measured now, the others before")
        return found


def measure(model: ScoredModel, rows: Sequence[Work], how: Measurement, store: Path) -> tuple[dict[str, Measured], int]:
    """Return the losses of all rows by their keys, and how many were not in the store.

    store: `stores.evaluations`, which keeps every row that is measured, also if this process is killed.

    Raises VlmflowError if a process fails.
    """
    kept = KeptLines(store, "losses", how.meaning(model), Measured)
    known = kept.read()
    missing = [row for row in rows if row.key not in known]
    if missing:
        _measure_missing(model, missing, how, kept)
        known = kept.read()
    if lost := [row.key for row in rows if row.key not in known]:
        raise VlmflowError(
            f"{store}: {len(lost)} of {len(rows)} losses that were measured are not there: {', '.join(lost[:3])}",
            "check the disk, then run the same command again",
        )
    return {row.key: known[row.key] for row in rows}, len(missing)


def _measure_missing(model: ScoredModel, rows: Sequence[Work], how: Measurement, kept: KeptLines[Measured]) -> None:
    what = f"losses of {model.name} ({how.device}, {how.dtype})"
    places = _places(model, how) if how.device == "cuda" else [None] * how.processes
    places = places[: len(rows)]
    outputs = [kept.new_file() for _ in places]
    with (
        tempfile.TemporaryDirectory(prefix="vlmflow-evaluate-") as scratch,
        Progress(what, len(rows), "rows") as progress,
        ExitStack() as ended,
    ):
        folder = Path(scratch)
        logs = [folder / f"log-{number}" for number in range(len(places))]
        processes = [
            _start(model, rows[number :: len(places)], how, folder, number, outputs[number], gpus, len(places))
            for number, gpus in enumerate(places)
        ]
        for process in processes:
            ended.callback(_end, process)
        while any(process.poll() is None for process in processes):
            _raise_if_one_failed(what, processes, logs)
            progress.advance(_written(outputs) - progress.count)
            time.sleep(0.2)
        _raise_if_one_failed(what, processes, logs)
        progress.advance(_written(outputs) - progress.count)


def _start(
    model: ScoredModel,
    rows: Sequence[Work],
    how: Measurement,
    folder: Path,
    number: int,
    output: Path,
    gpus: str | None,
    processes: int,
) -> subprocess.Popen[bytes]:
    work = folder / f"work-{number}.jsonl"
    work.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    settings = msgspec.json.encode(HowToMeasure(how.device, how.dtype, how.max_length, TOGETHER[how.device])).decode()
    arguments = template_arguments(model.folder, how.model_type, how.loss_scale, how.text_args)
    env = environment(how.pictures, how.image_max_tokens, folder / "cache", max(1, how.threads // processes))
    command = [sys.executable, "-m", answer_losses.__name__, str(work), str(output.absolute()), settings]
    with (folder / f"log-{number}").open("wb") as log:
        return subprocess.Popen(
            [*command, *as_words(arguments)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,  # ms-swift searches for a picture in the working directory first
            env=env if gpus is None else env | {"CUDA_VISIBLE_DEVICES": gpus},
            preexec_fn=bound_to_this_process(),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _raise_if_one_failed(what: str, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    for process, log in zip(processes, logs, strict=True):
        if code := process.poll():
            raise failed(what, log, code)


def _written(outputs: Sequence[Path]) -> int:
    return sum(count_lines(file) for file in outputs if file.exists())


def _places(model: ScoredModel, how: Measurement) -> list[str | None]:
    """Return the GPUs of each process: one, or as many as the weights need.

    Raises VlmflowError if the machine has fewer GPUs than the run.
    """
    import torch

    names = visible_gpus()
    if len(names) < how.processes:
        raise VlmflowError(
            f"the run has {how.processes} processes, and this machine {len(names)} GPUs",
            "set runs.NAME.processes to the number of GPUs",
        )
    weights = sum(file.stat().st_size for file in model.folder.glob("*.safetensors"))
    each = torch.cuda.get_device_properties(0).total_memory
    together = min(how.processes, -(-int(weights * SPARE) // each))
    return [",".join(names[first : first + together]) for first in range(0, how.processes - together + 1, together)]
