"""The trainers of one node: torchrun starts them, one process each, and they are its children."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vlmflow.config.machine_needs import search_path
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.files import remove
from vlmflow.core.processes import bound_to_this_process
from vlmflow.in_trainer import process as trainer
from vlmflow.in_trainer.messages import MicroBatches, Orders
from vlmflow.pictures.budget import BYTES_PER_TOKEN
from vlmflow.supervisor.run_folder import RunFolder, refuse_foreign_code
from vlmflow.swift import child_process
from vlmflow.swift.arguments import Training, as_words

JOIN_SECONDS = 7200
"""How long a node waits for the others, which may still pull the image. Before that the executor ends a group whose
pods do not all run, and the watch for hangs one in which nothing happens."""

GRACE = 10.0
"""Seconds for trainers to save and end, between SIGTERM and SIGKILL: one that was only slow may do so."""

FOR_END = 60.0
"""Seconds for killed processes to end; one that waits for a dead disk or GPU does not."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)

BATCHES_AHEAD = 2
"""Batches that each loader process of torch's DataLoader keeps ready (prefetch_factor)."""

LOADERS = 2
"""During an evaluation, the loader of the training rows keeps its batches too: ms-swift's loaders are persistent."""


@dataclass(frozen=True)
class Place:
    """A node's place in a training of several.

    node: its number, from 0. endpoint: host and port of node 0, where the nodes meet. meeting: the name of this
    meeting; a node that comes with another name meets nobody.
    """

    node: int
    endpoint: str
    meeting: str


ALONE = Place(0, "", "")
"""The place of a single node."""


def start(
    training: Training,
    folder: RunFolder,
    resume: Path | None,
    threads: int,
    role: Place = ALONE,
    lock: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start the trainers of one node; returns torchrun. Their output is appended to the node's log.

    resume: the checkpoint to resume from. threads: cores for all processes of this node together. lock: the run
    folder's lock, which the trainers hold as long as they run.

    Raises ForeignCodeError if the checkpoint would run code.
    """
    if resume is not None and training.strategy.engine == "deepspeed":
        refuse_foreign_code(resume)
    remove(_cache(folder, role.node) / "datasets")  # who can write there must not decide what is trained
    with log_of(folder, role.node).open("ab") as output:
        return subprocess.Popen(
            command(training, folder, resume, role),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(training, folder, threads, role.node),
            cwd=folder.path,  # ms-swift searches for a picture in the working directory first
            pass_fds=[lock] if lock is not None else [],
            start_new_session=True,  # signals to our group must not reach torchrun: it grants 30 s and kills
            preexec_fn=bound_to_this_process(signal.SIGTERM),
        )


def log_of(folder: RunFolder, node: int) -> Path:
    """Return the file with the output of a node's trainers: each node has its own, because NFS cannot append twice."""
    log = folder.trainer_log
    return log.with_stem(f"{log.stem}-{node}") if node else log


def command(training: Training, folder: RunFolder, resume: Path | None, role: Place = ALONE) -> list[str]:
    """Return the torchrun command line of a node."""
    meeting = ["--standalone"]
    if training.nodes > 1:  # only the static way gives each node the ranks of its own number
        meeting = [
            *(f"--nnodes={training.nodes}", f"--node_rank={role.node}", "--rdzv_backend=static"),
            *(f"--rdzv_endpoint={role.endpoint}", f"--rdzv_id={role.meeting}"),
            f"--rdzv_conf=timeout={JOIN_SECONDS}",
        ]
    torchrun = ["-m", "torch.distributed.run", *meeting, f"--nproc_per_node={training.processes}"]
    settings = training.settings
    groups = settings.group_by_length and settings.sequence_parallel == 1
    grouped = str(training.data.lengths("train").absolute()) if groups else None
    micro_batches = None
    if training.micro_batch_tokens is not None:
        train, val = (str(training.data.lengths(split).absolute()) for split in ("train", "val"))
        cut = training.micro_batch_tokens, training.rows_per_step, settings.seed, training.pads_rows
        micro_batches = MicroBatches(*cut, train=train, val=val)
    orders = Orders(
        folder=str(folder.path.absolute()),
        starter=os.getpid(),
        processes=training.ranks,
        batches_per_step=settings.gradient_accumulation_steps,
        tuner=training.tuner.name,
        strategy=training.strategy.name,
        early_stop_after=settings.early_stop_after,
        micro_batches=micro_batches,
        group_by_length=grouped,
        stop_at=training.stop_at,
        seconds=None if training.hours is None else 3600 * training.hours,
    )
    worker = ["-m", trainer.__name__, orders.as_word()]
    paths = {
        "model": training.model.folder,
        "dataset": training.data.train,
        "val_dataset": training.data.val,
        "output_dir": folder.output,
        **({"resume_from_checkpoint": resume} if resume else {}),
    }
    places = [word for name, path in paths.items() for word in (f"--{name}", str(path.absolute()))]
    # Our trainer makes batches and steps (in_trainer/batches.py); the last word of a name counts.
    ours = as_words({"gradient_accumulation_steps": 1, "group_by_length": False})
    return [sys.executable, *torchrun, *worker, *places, *training.arguments(), *ours]


def _cache(folder: RunFolder, node: int) -> Path:
    """Return the folder of ms-swift's caches: each node has its own, for locks of others may not be seen."""
    return folder.path / (f"cache-{node}" if node else "cache")


def environment(training: Training, folder: RunFolder, threads: int, node: int = 0) -> dict[str, str]:
    """Return the trainers' environment: ms-swift's, with its caches in the run folder and an equal share of cores."""
    cores = max(1, threads // training.processes)
    pictures, image_max_tokens = training.data.pictures, training.settings.image_max_tokens
    # Rows of all lengths leave gaps in the GPU's memory that segments of fixed size cannot use.
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    env = child_process.environment(pictures, image_max_tokens, _cache(folder, node), cores)
    return allocator | env | {"PATH": search_path()}


def shared_memory_needed(settings: TrainSettings, processes: int, picture_tokens: int | None = None) -> int:
    """Return the bytes of all loaders' batches.

    picture_tokens: the most in a batch; None if every row may have a picture of the largest size.
    """
    largest = settings.per_device_batch_size * settings.image_max_tokens
    batch = (largest if picture_tokens is None else picture_tokens) * BYTES_PER_TOKEN
    return processes * LOADERS * settings.dataloader_workers * BATCHES_AHEAD * batch


def refuse_small_shared_memory(
    settings: TrainSettings, processes: int, picture_tokens: int | None = None, folder: Path = SHARED_MEMORY
) -> None:
    """Refuse to train if the loaders' batches do not fit: the trainer would die of a bus error during the run.

    Containers have 64 MB by default. picture_tokens: see `shared_memory_needed`. folder: the mount
    point of the shared memory. Raises VlmflowError.
    """
    needed, free = shared_memory_needed(settings, processes, picture_tokens), shutil.disk_usage(folder).free
    if needed > free:
        raise VlmflowError(
            f"{folder} has {free / 1e6:,.0f} MB free, but the data loaders of {processes} process(es) need "
            f"{needed / 1e6:,.0f}",
            "give the container more shared memory (docker run --shm-size; in a pod, a memory-backed volume), or set "
            "train.dataloader_workers to 0",
        )


def ranks_of(torchrun: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """Return the trainers that run, by rank."""
    ranks = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(torchrun.pid).children():
            with suppress(psutil.Error, KeyError):
                ranks[int(child.environ()["RANK"])] = child
    return ranks


def let_them_save(torchrun: subprocess.Popen[bytes], told: set[int]) -> None:
    """Tell the trainers to save a checkpoint and end; those that still load end at once.

    told: the process ids of those that were told before; those of the others are added. Call it again until torchrun
    ends: its child may be no trainer yet, and would forget the signal, or be a program that tells it about the machine.

    torchrun itself would kill them after 30 seconds. If it has no child, and never had a trainer, it is killed: there
    is nothing to save, and while it waits for other nodes it answers no other signal.
    """
    for process in ranks_of(torchrun).values():
        if process.pid not in told:
            told.add(process.pid)
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
    with suppress(psutil.NoSuchProcess):
        if not told and not psutil.Process(torchrun.pid).children():
            torchrun.kill()


def end(torchrun: subprocess.Popen[bytes]) -> bool:
    """Let the trainers save and end, then kill them and their own children; torchrun ends with them.

    Returns whether it ended: the kernel may not end a process that waits for a device.
    """
    everybody = [] if torchrun.poll() is not None else psutil.Process(torchrun.pid).children(recursive=True)
    told: set[int] = set()
    let_them_save(torchrun, told)
    if not told:
        torchrun.kill()
    _, alive = psutil.wait_procs(everybody, timeout=GRACE)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        torchrun.wait(FOR_END)
    except subprocess.TimeoutExpired:
        return False
    return True


class Signals:
    """The signals that this process got for its trainers. numbers: of all of them so far. trainers: torchrun."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.trainers: subprocess.Popen[bytes] | None = None
        self._told: set[int] = set()

    def take(self, number: int, frame: Any) -> None:
        """Handle a signal. It raises nothing: Python drops what a handler raises while it starts a process."""
        self.numbers.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.pass_on()
        name = signal.Signals(number).name
        trainers = counted(len(self._told), "trainer")
        log.info(f"{name}: to save a checkpoint and end: {trainers}; those that still load end at once")

    def pass_on(self) -> None:
        """Let the trainers know of a signal, if there was one; also those that have started since."""
        if self.numbers and self.trainers is not None:
            let_them_save(self.trainers, self._told)


@contextmanager
def signals_passed_on() -> Iterator[Signals]:
    """Pass SIGTERM and Ctrl-C to torchrun's children, which save and end; torchrun would kill them after 30 s.

    A second Ctrl-C ends at once.
    """
    signals = Signals()
    before = {number: signal.signal(number, signals.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
