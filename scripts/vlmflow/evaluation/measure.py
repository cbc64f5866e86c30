"""Measures rows with the base and the tuned model: what a row becomes for them, and its losses in each context.

Several processes measure side by side (`answer_losses`), each with its share of the rows and GPUs. What was measured
once is kept.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.files import count_lines
from vlmflow.core.processes import bound_to_this_process
from vlmflow.core.progress import Progress
from vlmflow.evaluation import answer_losses
from vlmflow.evaluation.answer_losses import HowToMeasure, Measured, Pass, Work
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.report import (
    NEUTRAL,
    OTHER_PICTURE,
    OTHERS,
    OWN,
    QUESTION,
    EvaluatedRow,
    KeptLines,
    LeftOut,
    Loss,
    Margin,
)
from vlmflow.evaluation.scoring.judge import holds
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
class ChosenRow:
    """A row to evaluate.

    donors: the rows whose feedback is a control; none in a data set without feedback. picture_donor: the row whose
    picture is; None if there is none. gold_in_feedback: whether its feedback contains the gold answer. echo: see
    `choice.echoes`.
    """

    case: Case
    donors: Sequence[Case]
    picture_donor: Case | None
    gold_in_feedback: bool
    echo: list[str]
    work: Work


def row_to_measure(
    case: Case,
    donors: Sequence[Case] = (),
    picture_donor: Case | None = None,
    *,
    neutral: Sequence[str] = (),
    gold: str | None = None,
    echo: Sequence[str] = (),
) -> ChosenRow:
    """Return a row with its controls and its conversations.

    neutral: neutral feedback for each of its own; () for none. gold: the gold answer, if the raw row has it. The others
    are as in `ChosenRow`.
    """
    passes = passes_of(case, donors, picture_donor, neutral)
    content = msgspec.json.encode([passes, case.pictures, picture_donor.pictures if picture_donor else None])
    work = Work(hashlib.sha256(content).hexdigest()[:32], passes)
    answer = gold or answer_in(case.answer)
    gold_in_feedback = any(holds(feedback, answer) for feedback in case.feedback)
    return ChosenRow(case, donors, picture_donor, gold_in_feedback, list(echo), work)


def passes_of(
    case: Case, donors: Sequence[Case], picture_donor: Case | None, neutral: Sequence[str] = ()
) -> dict[str, Pass]:
    """Return the conversations of a row, by context and answer (`margins_of`).

    donors: the rows whose feedback is a control, with as many turns of it, without its pictures; none in a data set
    without feedback.
    picture_donor: the row whose pictures are the control, with as many; None if there is none.
    neutral: neutral feedback for each of the row's own, if that is a control.
    """
    contexts = {QUESTION: case.turns[:1], OWN: case.turns[:-1]} if donors else {QUESTION: case.turns[:-1]}
    others = [(OTHERS[number], donor.feedback) for number, donor in enumerate(donors)]
    for context, feedback in [*([(NEUTRAL, neutral)] if neutral else []), *others]:
        contexts[context] = list(case.turns[:-1])
        contexts[context][2::2] = [Turn("human", without_tags(text)) for text in feedback[: len(case.feedback)]]
    pictures = dict.fromkeys(contexts, case.row.images)
    if picture_donor is not None:
        contexts[OTHER_PICTURE] = contexts[OWN] if donors else contexts[QUESTION]
        pictures[OTHER_PICTURE] = picture_donor.row.images
    answers = scored_answers(case) if donors else {RIGHT: case.turns[-1]}
    begins = BEGINNING if donors and answers[RIGHT].value.startswith(BEGINNING) else ""
    if donors:  # what the training left out of the loss is history like all else
        contexts = {name: [Turn(turn.speaker, turn.value) for turn in turns] for name, turns in contexts.items()}
    return {
        f"{context} {which}": Pass(
            [*case.system, *before, answer], pictures[context][: tags_in(before)], begins, case.row.tools or UNSET
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


Scorer = Callable[[Sequence[Work]], Mapping[str, Measured]]
"""Measures rows with one model: returns the losses by the works' keys."""


def evaluated_rows(
    chosen: Sequence[ChosenRow], base: Scorer, tuned: Scorer
) -> tuple[list[EvaluatedRow], list[LeftOut]]:
    """Measure rows with both models; returns the results, and the rows that are too long for the run.

    Raises VlmflowError if both models did not get the same tokens, or the scored answer of a row is not the same in all
    passes.
    """
    work = [row.work for row in chosen]
    of_base, of_tuned = base(work), tuned(work)
    evaluated, too_long = [], []
    for row in chosen:
        identity = row.case.row.id
        ours, theirs = of_tuned[row.work.key], of_base[row.work.key]
        if ours.inputs != theirs.inputs:
            raise VlmflowError(
                f"row {identity}: the base and the tuned model get different tokens",
                "the tuned folder has another tokenizer, chat template or picture rule than its base: remove verified/ "
                "and merged/ of the run, and run the same command again",
            )
        if not ours.losses:
            too_long.append(LeftOut(identity, "over_long", f"{ours.tokens} tokens, more than train.max_length"))
            continue
        _refuse_other_answers(identity, ours)
        # Without feedback all answers are scored.
        answers = {which: turn.value for which, turn in scored_answers(row.case).items()} if row.donors else {}
        evaluated.append(
            EvaluatedRow(
                id=identity,
                source=row.case.row.source,
                images=row.case.row.images,
                group=row.case.group,
                right=answers.get(RIGHT),
                wrong=answers.get(WRONG),
                donors=[donor.row.id for donor in row.donors],
                echo=row.echo,
                picture_donor=row.picture_donor.row.id if row.picture_donor else None,
                gold_in_feedback=row.gold_in_feedback,
                base=margins_of(theirs.losses),
                tuned=margins_of(ours.losses),
            )
        )
    return evaluated, too_long


def _refuse_other_answers(identity: str, measured: Measured) -> None:
    """Refuse a row of which an answer has other tokens in another context: the losses would not compare."""
    for which in (RIGHT, WRONG):
        tokens = {name: loss.tokens for name, loss in measured.losses.items() if name.endswith(which)}
        if len({(measured.answers[name], count) for name, count in tokens.items()}) > 1:
            raise VlmflowError(
                f"row {identity}: its answer has different tokens in different contexts (their numbers: {tokens})",
                "this is a bug; please report it with the row",
            )


def margins_of(losses: dict[str, Loss]) -> dict[str, Margin]:
    """Return the margins by context. losses: by the names of `passes_of`."""
    contexts = dict.fromkeys(name.split()[0] for name in losses)
    return {name: Margin(losses[f"{name} {RIGHT}"], losses.get(f"{name} {WRONG}")) for name in contexts}


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


def scorer(model: ScoredModel, how: Measurement, store: Path) -> Scorer:
    """Return what measures rows with one model, and logs how many were not in the store. The parameters: `measure`."""

    def losses_of(rows: Sequence[Work]) -> Mapping[str, Measured]:
        losses, new = measure(model, rows, how, store)
        log.info(f"losses of {model.name}: {new} of {len(rows)} rows were measured now, the others before")
        return losses

    return losses_of


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
    label = f"losses of {model.name} ({how.device}, {how.dtype})"
    gpus = (_gpus_of_processes(model, how) if how.device == "cuda" else [None] * how.processes)[: len(rows)]
    outputs = [kept.new_file() for _ in gpus]
    settings = HowToMeasure(how.device, how.dtype, how.max_length, TOGETHER[how.device])
    words = as_words(template_arguments(model.folder, how.model_type, how.loss_scale, how.text_args))
    with (
        tempfile.TemporaryDirectory(prefix="vlmflow-evaluate-") as scratch,
        Progress(label, len(rows), "rows") as progress,
        ExitStack() as ended,
    ):
        folder = Path(scratch)
        threads = max(1, how.threads // len(gpus))
        env = environment(how.pictures, how.image_max_tokens, folder / "cache", threads)

        def start(number: int) -> subprocess.Popen[bytes]:
            work = folder / f"work-{number}.jsonl"
            write_lines(work, rows[number :: len(gpus)])
            files = [str(work), str(outputs[number].absolute())]
            command = [sys.executable, "-m", answer_losses.__name__, *files, msgspec.json.encode(settings).decode()]
            gpu = gpus[number]
            own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            with (folder / f"log-{number}").open("wb") as output:
                process = subprocess.Popen(
                    [*command, *words],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,  # ms-swift searches for a picture in the working directory first
                    env=env | own,
                    preexec_fn=bound_to_this_process(),
                )
            ended.callback(process.wait)
            ended.callback(process.kill)
            return process

        processes = [start(number) for number in range(len(gpus))]
        running = True
        while running:
            running = any(process.poll() is None for process in processes)
            for number, process in enumerate(processes):
                if code := process.poll():
                    raise failed(label, folder / f"log-{number}", code)
            progress.advance(sum(count_lines(file) for file in outputs if file.exists()) - progress.count)
            time.sleep(0.2 if running else 0)


def _gpus_of_processes(model: ScoredModel, how: Measurement) -> list[str | None]:
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
    memory = torch.cuda.get_device_properties(0).total_memory
    together = min(how.processes, -(-int(weights * SPARE) // memory))
    return [",".join(names[first : first + together]) for first in range(0, how.processes - together + 1, together)]


def write_lines(file: Path, lines: Sequence[msgspec.Struct]) -> None:
    """Write accounts as JSON lines."""
    file.write_bytes(msgspec.json.Encoder().encode_lines(lines))
