"""The launch file: what the first node of a training tells the others, and what each of them reports.

All of it is data: settings, which are checked as those of a configuration, and paths; a node makes its own command from
them. Both files are in the run folder, which every node sees, and carry the attempt's name, so that a node of an
earlier attempt finds nothing.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pydantic

from vlmflow.config.deepspeed_json import check_deepspeed
from vlmflow.config.model_types import check_model_type
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import strategy_of
from vlmflow.config.tuners import tuner_of
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, Passes, Targets, Training

ATTEMPT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""The name of an attempt; on a cluster it is that of a Kubernetes object."""

ENDPOINT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?:[0-9]{1,5}")
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,18}")

MOST_BYTES = 1_000_000
"""A launch file with the largest settings of DeepSpeed that a configuration may have takes less."""

MOST = 100_000
"""Of nodes, processes and sessions: beyond them a file is not ours."""

Order = Literal["train", "stacks", "stop"]
"""What the nodes are to do. stacks: let every trainer write where it is. stop: end the trainers."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The launch file.

    session: the number of the start of trainers in this attempt, from 1. endpoint: host and port of node 0.
    resume: the checkpoint's name, or null. The other fields are those of `Training` and `TrainingData`.
    """

    attempt: str
    session: int
    order: Order
    endpoint: str
    resume: str | None
    train: str
    val: str
    pictures: str
    data_digest: str
    last_answer_only: bool
    model: str
    model_type: str
    model_digest: str
    settings: dict[str, Any]
    device: Literal["cuda", "cpu"]
    nodes: int
    processes: int
    strategy: str
    deepspeed: dict[str, Any] | None
    tuner: str
    one_sequence: bool
    found: Passes | None
    stop_at: int | None
    hours: float | None
    targets: Targets | None

    @classmethod
    def of(cls, training: Training, attempt: str, session: int, endpoint: str, resume: Path | None) -> Self:
        """Return the order to train."""
        data, model = training.data, training.model
        return cls(
            attempt=attempt,
            session=session,
            order="train",
            endpoint=endpoint,
            resume=resume.name if resume else None,
            train=str(data.train.absolute()),
            val=str(data.val.absolute()),
            pictures=str(data.pictures.absolute()),
            data_digest=data.digest,
            last_answer_only=data.last_answer_only,
            model=str(model.folder.absolute()),
            model_type=model.model_type,
            model_digest=model.digest,
            settings=training.settings.model_dump(mode="json"),
            device="cuda" if training.device == "cuda" else "cpu",
            nodes=training.nodes,
            processes=training.processes,
            strategy=training.strategy.name,
            deepspeed=training.strategy.deepspeed,
            tuner=training.tuner.name,
            one_sequence=data.one_sequence,
            found=training.found,
            stop_at=training.stop_at,
            hours=training.hours,
            targets=training.targets,
        )

    @property
    def meeting(self) -> str:
        """The name under which the trainers of this session meet."""
        return f"{self.attempt}.{self.session}"

    def training(self) -> Training:
        """Return the training. Raises ValueError if a value is not one that a configuration may have."""
        data = TrainingData(
            *(_place(self.train), _place(self.val), _place(self.pictures), self.data_digest, self.last_answer_only),
            one_sequence=self.one_sequence,
        )
        return Training(
            data,
            BaseModel(_place(self.model), check_model_type(self.model_type), self.model_digest),
            TrainSettings.model_validate(self.settings),
            self.device,
            self.processes,
            strategy_of(self.strategy, self.deepspeed and check_deepspeed(self.deepspeed)),
            tuner_of(self.tuner),
            self.nodes,
            self.stop_at,
            self.hours,
            self.found,
            self.targets,
        )


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node reports.

    session: the newest that it has seen. runs: whether its trainers run. code: torchrun's exit code, null without one.
    """

    session: int
    runs: bool
    code: int | None


def launch_file(run_folder: Path, attempt: str) -> Path:
    """Return the launch file of an attempt."""
    return run_folder / f"launch-{attempt}.json"


def report_file(run_folder: Path, attempt: str, node: int) -> Path:
    """Return the file with a node's report."""
    return run_folder / f"launch-{attempt}.node-{node}.json"


def write_launch(run_folder: Path, launch: Launch) -> None:
    """Write the launch file into a run folder."""
    write_account(launch_file(run_folder, launch.attempt), launch)


def read_launch(file: Path) -> tuple[Launch, Training] | None:
    """Read a launch file, and the training that it describes; None if it no longer exists.

    Raises VlmflowError if it is none, or its folder is not that of the training.
    """
    try:
        launch = msgspec.json.decode(_limited(file), type=Launch)
        if launch_file(file.parent, launch.attempt) != file or not ATTEMPT.fullmatch(launch.attempt):
            raise ValueError(f"it is of the attempt {launch.attempt!r:.80}")
        if not ENDPOINT.fullmatch(launch.endpoint):
            raise ValueError(f"endpoint: {launch.endpoint!r:.80}")
        if launch.resume is not None and not CHECKPOINT.fullmatch(launch.resume):
            raise ValueError(f"resume: {launch.resume!r:.80}")
        if not all(1 <= number <= MOST for number in (launch.nodes, launch.processes, launch.session)):
            raise ValueError("nodes, processes and session must be 1 or more")
        training = launch.training()
        if training.digest() != file.parent.name:
            raise ValueError("its training has another digest than this folder's name")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, pydantic.ValidationError, VlmflowError) as error:
        raise VlmflowError(
            f"{file}: not a launch file of this version: {error!s:.500}",
            "all nodes must have the same version of vlmflow; then run the same command again",
        ) from None
    return launch, training


def read_report(run_folder: Path, attempt: str, node: int) -> Report | None:
    """Read a node's report; None if it has written none that can be read."""
    try:
        return msgspec.json.decode(_limited(report_file(run_folder, attempt, node)), type=Report)
    except (OSError, ValueError, RecursionError):
        return None


def _limited(file: Path) -> bytes:
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is not a file")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return content


def _place(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ValueError(f"{text!r:.200}: not an absolute path")
    return path
