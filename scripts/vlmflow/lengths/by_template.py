"""Counts the tokens of rows with ms-swift's own template, for models whose chat form `lengths.chat_form` is not.

A child process encodes rows as the trainers do (`swift.counted_row`). Each process that counts starts its own, so
that as many cores as count rows encode them, and each imports ms-swift once.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from vlmflow.core.errors import VlmflowError
from vlmflow.core.process import bound_to_this_process
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.count import Tokens
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift import row_counter
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.child_process import environment, failed

WHAT = "counting tokens with ms-swift's template"


class TemplateCounter:
    """Counts like the trainers.

    arguments: ms-swift's, of model and template. environment: of the child. scratch: a folder that outlives this
    counter; each process has a folder in it. whole: whether pictures are encoded, not counted by their sizes.
    """

    def __init__(
        self, arguments: Mapping[str, object], environment: Mapping[str, str], scratch: Path, *, whole: bool
    ) -> None:
        self._words = [row_counter.WHOLE if whole else row_counter.BY_SIZE, *as_words(dict(arguments))]
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
    ) -> Self:
        """Return the counter of a run's rows. image_max_tokens, text_args: see TrainSettings. The others: as above."""
        arguments = template_arguments(model.folder, model.model_type, data.loss_scale, text_args)
        return cls(
            arguments, environment(data.pictures, image_max_tokens, scratch / "cache", threads=1), scratch, whole=whole
        )

    def measure(self, rows: Sequence[ShareGptRow]) -> list[Tokens]:
        """Return the tokens of each row.

        Raises VlmflowError with the row's id if the template refuses it, or if the child ends.
        """
        if self._owner != os.getpid():  # this counter came here by a fork
            self._start()
        try:
            self._connection.send_bytes(b"\n".join(as_line(row, row.images) for row in rows))
            counted = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise failed(WHAT, self._log, self._child.wait()) from None
        if isinstance(counted, dict):
            raise VlmflowError(
                f"row {counted['row']}: ms-swift's template of the model fails: {counted['failed']}",
                "leave such rows out of the raw file, or choose another template (runs.NAME.train.swift_args)",
            )
        return [Tokens(tokens - pictures, pictures, trained) for tokens, pictures, trained in counted]

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
