"""Measures all rows of a run's train and val split: by arithmetic if ms-swift agrees, or else by its own template.

Its own template counts where `swift.chat_form` is not the model's chat form. Then a child process encodes rows as the
trainers do (`swift.row_counter`). Each process that counts starts its own, so that as many cores as count rows encode
them, and each imports ms-swift once.

The summary has digests of all inputs of the lengths, and of their files, so that lengths of other rows are refused.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.files import sha256_of, whole_file
from vlmflow.core.processes import bound_to_this_process
from vlmflow.lengths.against_swift import CheckedRows, accepted_difference, check_lengths, template_arguments
from vlmflow.lengths.count import Counter, LengthAccount, Tokens, max_lengths, measure_rows, special_tokens
from vlmflow.lengths.summary import ChatTemplate, LengthSummary, MeasuredFiles, text_digests
from vlmflow.pictures.budget import PictureBudget, processor_of
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift import row_counter
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.child_process import environment, failed

WHAT = "counting tokens with ms-swift's template"


class TemplateCounter:
    """Counts like the trainers.

    arguments: ms-swift's, of model and template. environment: of the child. scratch: a folder that outlives this
    counter; each process has a folder in it. whole: whether pictures are encoded, not counted by their sizes. compared:
    whether all rows must be what the model's own chat template writes.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        environment: Mapping[str, str],
        scratch: Path,
        *,
        whole: bool,
        compared: bool = False,
    ) -> None:
        how = row_counter.WHOLE if whole else row_counter.BY_SIZE
        where = row_counter.COMPARED if compared else row_counter.ALONE
        self._model = Path(str(arguments["model"]))
        self._words = [how, where, *as_words(dict(arguments))]
        self._environment = dict(environment)
        self._scratch = scratch
        self._owner = 0

    @classmethod
    def of_run(
        cls,
        model: BaseModel,
        data: TrainingData,
        image_max_tokens: int,
        text_args: Mapping[str, Any],
        scratch: Path,
        *,
        whole: bool = True,
        compared: bool = False,
    ) -> Self:
        """Return the counter of a run's rows. image_max_tokens, text_args: see TrainSettings. The others: as above."""
        arguments = template_arguments(model.folder, model.model_type, data.loss_scale, text_args)
        env = environment(data.pictures, image_max_tokens, scratch / "cache", threads=1)
        return cls(arguments, env, scratch, whole=whole, compared=compared)

    def measure(self, rows: Sequence[ShareGptRow]) -> list[Tokens]:
        """Return the tokens of each row.

        Raises VlmflowError with the row's id if the template refuses it, or the model's own one differs, or if the
        child ends.
        """
        if self._owner != os.getpid():  # this counter came here by a fork
            self._start()
        try:
            self._connection.send_bytes(b"\n".join(as_line(row, row.images) for row in rows))
            counted = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise failed(WHAT, self._log, self._child.wait()) from None
        if isinstance(counted, dict):
            accepted_difference(counted.get("difference", {}), self._model, {}, False)
            raise VlmflowError(
                f"row {counted['row']}: ms-swift's template of the model fails: {counted['failed']}",
                "leave such rows out of the raw file, or choose another template (runs.NAME.train.swift_args)",
            )
        return [Tokens(total - pictures, pictures, trained) for total, pictures, trained in counted]

    def _start(self) -> None:
        folder = self._scratch / f"counter-{os.getpid()}"
        folder.mkdir(parents=True)
        self._log = folder / "log"
        caches = {name: str(folder / name.lower()) for name in ("HF_DATASETS_CACHE", "HF_HOME", "MODELSCOPE_CACHE")}
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", row_counter.__name__, str(theirs.fileno()), *self._words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=self._environment | caches,
                pass_fds=[theirs.fileno()],
                preexec_fn=bound_to_this_process(),
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._owner = os.getpid()


def measure_lengths(
    data: TrainingData,
    files: dict[str, Path],
    counter: Counter,
    model: BaseModel,
    image_max_tokens: int,
    text_args: dict[str, Any],
    processes: int,
    template_differs: bool = False,
    tensors: list[str] | None = None,
) -> LengthSummary:
    """Write the length of every row of train and val (lines of RowLength), and return the summary.

    files: the lengths file to write, by split ("train", "val"). counter: for this model, picture budget and chat form.
    image_max_tokens, text_args: see TrainSettings. template_differs: see ModelSettings. tensors: see SmallFiles.
    If ms-swift's own template gives some of the rows other lengths, it counts them all. The files get their names only
    if the model's chat template gives the same tokens.

    Raises VlmflowError if it gives others, or if the base is not whole.
    """
    rows = {"train": data.train, "val": data.val}
    checked = {split: CheckedRows() for split in rows}
    encode = msgspec.json.Encoder().encode
    with ExitStack() as stack:
        targets = {split: stack.enter_context(whole_file(file)) for split, file in files.items()}

        def measure(counter: Counter) -> dict[str, LengthAccount]:
            accounts = {split: LengthAccount() for split in rows}
            for split, target in targets.items():
                target.seek(0)
                for length in measure_rows(rows[split], counter, processes, special):
                    target.write(encode(length) + b"\n")
                    accounts[split].add(length)
                    checked[split].see(length)
                target.truncate()
            return accounts

        special = special_tokens(model.folder)
        accounts = measure(counter)
        log.info("a sample of the rows, in ms-swift's own template and in the model's")
        chosen = {rows[split]: checked[split].rows() for split in rows}
        how = image_max_tokens, text_args, processes, template_differs, tensors
        result = check_lengths(chosen, data, model, *how)
        if result.differs:
            log.info("all rows are counted with ms-swift's own template: %s", result.differs)
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="vlmflow-lengths-")))
            run = model, data, image_max_tokens, text_args, scratch
            accounts = measure(TemplateCounter.of_run(*run, whole=not result.by_size, compared=not template_differs))
    largest = max(each.most_of_picture for each in accounts.values())
    if exceeded := PictureBudget.of(model.folder, image_max_tokens).exceeded(largest):
        log.warning(exceeded)
    if result.chat_template:
        log.warning("accepted by template_differs: %s", result.chat_template)
    chosen_rows = sum(map(len, chosen.values()))
    train, val = accounts["train"].describe(), accounts["val"].describe()
    compared = chosen_rows if template_differs else train.rows + val.rows
    return LengthSummary(
        train=train,
        val=val,
        max_length=max_lengths(accounts.values()),
        image_max_tokens=image_max_tokens,
        text_args=text_args,
        compared_with_ms_swift=chosen_rows,
        chat_template=ChatTemplate(compared, result.chat_template),
        one_sequence=result.one_sequence,
        by_template=result.differs is not None,
        model_type=model.model_type,
        example=result.example,
        model=result.model,
        digests=_digests({f"{split}.jsonl": sha256_of(file) for split, file in rows.items()}, files, model.folder),
    )


def refuse_other_lengths(
    summary: Path,
    lengths: Mapping[str, Path],
    stats: Stats,
    model: Path,
    image_max_tokens: int,
    text_args: dict[str, Any],
) -> LengthSummary:
    """Refuse lengths of other inputs, or that have changed since they were measured; returns their account.

    summary, lengths: the files of `measure_lengths`. stats: the data set's own account. model: the base model's folder.
    image_max_tokens, text_args: see TrainSettings.

    Raises VlmflowError with all differences.
    """
    measured = read_account(summary, LengthSummary)
    was = measured.digests
    now = _digests({f"{split}.jsonl": stats.digests[f"{split}.jsonl"] for split in lengths}, lengths, model)
    differ = [f"{name} has other rows" for name in _differing(was.rows, now.rows)]
    differ += [f"{summary.parent / name} has changed since" for name in _differing(was.lengths, now.lengths)]
    differ += [f"{model / name} is another file" for name in _differing(was.model, now.model)]
    if measured.image_max_tokens != image_max_tokens:
        differ.append(f"image_max_tokens was {measured.image_max_tokens}, not {image_max_tokens}")
    if measured.text_args != text_args:
        differ.append(f"text_args was {measured.text_args}, not {text_args}")
    if differ:
        raise VlmflowError(
            f"{summary}: these are not the lengths of this run's rows: {'; '.join(differ)}",
            f"measure them again: snakemake --forcerun measure_lengths -- {summary}",
        )
    return measured


def _digests(rows: dict[str, str], lengths: Mapping[str, Path], model: Path) -> MeasuredFiles:
    """Return the digests of the rows, of the lengths files, and of the model's files that determine lengths."""
    processor = processor_of(model)
    return MeasuredFiles(
        rows,
        {f"{split}.jsonl": sha256_of(file) for split, file in lengths.items()},
        text_digests(model) | ({processor.file: sha256_of(model / processor.file)} if processor else {}),
    )


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def in_words(summary: LengthSummary) -> str:
    """Return what a summary of lengths means for train.max_length, in one line."""
    train, longest = summary.train, summary.train.longest[0]
    most, all_rows = summary.max_length.covers_most, summary.max_length.covers_all
    above = " (for those above it: over_long: leave_out or shorten)" if most < all_rows else ""
    return (
        f"{train.rows:,} rows to train on, {train.tokens:,} tokens, {train.picture_share:.0%} of them pictures, "
        f"{train.trained_tokens:,} trained; "
        f"the longest row has {longest.tokens:,} ({longest.id}); "
        f"train.max_length: {most} covers 99.9 % of the rows of train and of val{above}, {all_rows} all"
    )
