"""Trainings that are interrupted, hang or go wrong, each made in the real trainers of two processes.

Where a training goes on, its losses by step are those of the unbroken one. `make test` makes a hang, on whose training
other tests look too, and a loss that is no number; the others run before a release. A full disk is in test_trainer, and
SIGTERM within an evaluation, to all ranks, in test_training_ends.
"""

import logging
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tiny_trainings import Tiny, check_rows, losses_of
from trainer_faults import make_fault, passes
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.messages import BAD_STEP, Log, read_events, rows_of_step
from vlmflow.supervisor import launch, watch
from vlmflow.supervisor.train import Trained, report, train
from vlmflow.swift.arguments import Training
from warm_programs import fresh_torchrun

STEPS = 6
HANG_SECONDS = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny text model and its rows; neither split can be divided by two."""
    return Tiny.write(tmp_path_factory.mktemp("tiny"), vision=False, rows=11, val_rows=7)


def short(tiny: Tiny, **settings: object) -> Training:
    """Two processes, more than one pass over the rows, a checkpoint and an evaluation every second step."""
    values = {"max_steps": STEPS, "checkpoint_steps": 2, "evaluation_steps": 2, "hang_minutes": HANG_SECONDS / 60}
    return tiny.training(processes=2, **values | settings)


@pytest.fixture(scope="module")
def unbroken(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """The losses of the unbroken training."""
    training = short(tiny)
    return by_step(training, train(training, tmp_path_factory.mktemp("unbroken"), 2, "train_model r"))


@dataclass(frozen=True)
class Hung:
    """A training in which rank 1 hung at step 4, and its end. said: the warnings."""

    folder: Path
    training: Training
    trained: Trained
    said: list[str]


@pytest.fixture(scope="module")
def hung(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Hung:
    folder, training, said = tmp_path_factory.mktemp("hung"), short(tiny), Said()
    with fresh_torchrun(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "GRACE", 1.0)
        make_fault(patch, folder, "hang", "step", 4, rank=1)
        logging.getLogger("vlmflow").addHandler(said)
        trained = train(training, folder / "runs", 2, "train_model r")
        logging.getLogger("vlmflow").removeHandler(said)
    return Hung(folder, training, trained, said.messages)


class Said(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_training_that_hangs_is_resumed_once(hung: Hung) -> None:
    (said,) = hung.said
    # As long as it was silent, which is a little more than HANG_SECONDS.
    assert re.match(r"train_model r: no sign of life for 0\.[1-9]\d? minutes; rank 0, training, is ", said)
    assert "rank 1, training, is in act (fault/before.py:" in said
    assert said.endswith("(after step 3): resuming once from step 2")
    log = hung.trained.folder.trainer_log.read_text()
    assert "rank 0 hangs; its stacks:" in log
    assert "rank 1 hangs; its stacks:" in log
    losses = losses_of(hung.training, hung.folder / "runs")
    assert [step for step, _ in losses] == [1, 2, 3, 3, 4, 5, 6]
    assert losses[2][1] == pytest.approx(losses[3][1], rel=1e-5)


def test_the_validation_loss_is_that_of_all_tokens_of_all_rows(hung: Hung, tiny: Tiny) -> None:
    """Computed again by transformers and peft alone, row by row, from what the ranks evaluated.

    In float32, too: PyTorch's sum over 151,936 tokens on a CPU is 1e-5 off.
    """
    found = [one for rank in (0, 1) for one in passes(hung.folder, "evaluated", rank) if one.step == STEPS]
    assert len(found) == 8, "four passes on each rank"
    rows = {tuple(one.tokens[0]): one.labels[0] for one in found}
    assert len(rows) == 7, "every row, and one of them twice"
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "base", dtype="float32")
    model = PeftModel.from_pretrained(base, hung.trained.last.folder)
    nll, tokens = 0.0, 0
    for ids, labels in rows.items():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        trained = torch.tensor(labels[1:])
        nll += torch.nn.functional.cross_entropy(logits, trained, reduction="sum").item()
        tokens += int((trained != -100).sum())
    account = report(hung.training, hung.trained)
    assert account.eval_losses[-1] == (STEPS, pytest.approx(nll / tokens, abs=1e-6))
    assert (account.eval_rows, account.eval_tokens) == (7, tokens)


def test_the_run_folder_says_which_rows_were_in_a_step(hung: Hung, tiny: Tiny) -> None:
    """Also of step 4, which was begun twice, and of the second pass over the rows."""
    check_rows(hung.folder, hung.trained.folder.path, tiny, steps=range(1, STEPS + 1), ranks=2)


def test_the_progress_file_has_what_a_page_shows(hung: Hung) -> None:
    events = read_events(hung.trained.folder.progress)
    logs = [event for event in events if isinstance(event, Log)]
    assert all(isinstance(log.waited, float) and 0 < log.waited < 60 for log in logs)
    assert all(isinstance(log.memory, int) and log.memory > 10**8 for log in logs)


def by_step(training: Training, trained: Trained) -> dict[str, dict[int, float]]:
    account = report(training, trained)
    assert account.eval_rows == 7
    return {"losses": dict(account.losses), "eval_losses": dict(account.eval_losses)}


def check_equal(found: dict[str, dict[int, float]], unbroken: dict[str, dict[int, float]]) -> None:
    for kind, losses in unbroken.items():
        assert list(found[kind]) == list(losses)
        assert list(found[kind].values()) == pytest.approx(list(losses.values()), rel=1e-5)


INTERRUPTIONS = [
    (what, place, rank)
    for what in ("SIGTERM", "SIGKILL")
    for place in ("step", "evaluation", "save")
    for rank in (0, 1)
]


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.slow
@pytest.mark.parametrize(("what", "place", "rank"), INTERRUPTIONS)
def test_an_interrupted_training_resumes_and_has_the_losses_of_an_unbroken_one(
    tiny: Tiny,
    unbroken: dict[str, dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    place: str,
    rank: int,
) -> None:
    """A signal to one rank alone. After SIGTERM no step is lost."""
    make_fault(monkeypatch, tmp_path, what, place, 4, rank)
    training, runs = short(tiny), tmp_path / "runs"
    with pytest.raises(PassingError) as stopped:
        train(training, runs, 2, "train_model r")
    done = [step for step, _ in losses_of(training, runs)]
    if what == "SIGTERM":
        # Within a save, the next step is the first that can say so.
        last = {"step": 4, "evaluation": 4, "save": 5}[place]
        assert f"interrupted, with step {last} of {STEPS}" in stopped.value.cause
        assert done == list(range(1, last + 1))
    else:
        assert "SIGKILL" in stopped.value.cause
        assert "resumes from the newest checkpoint" in stopped.value.next_step
    trained = train(training, runs, 2, "train_model r")
    check_equal(by_step(training, trained), unbroken)
    again = [step for step, _ in losses_of(training, runs)][len(done) :]
    assert again[0] == (done[-1] + 1 if what == "SIGTERM" else 3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 1.0)


@pytest.mark.slow
def test_a_hang_leaves_no_trace_in_the_losses(hung: Hung, unbroken: dict[str, dict[int, float]]) -> None:
    check_equal(by_step(hung.training, hung.trained), unbroken)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_programs", "impatient")
@pytest.mark.parametrize(("place", "doing"), [("evaluation", "evaluating"), ("save", "saving")])
def test_a_second_hang_from_the_same_checkpoint_ends_the_stage(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, doing: str
) -> None:
    monkeypatch.setattr(watch, "LONGER", 1.5)
    make_fault(monkeypatch, tmp_path, "hang", place, 4, rank=0, once=False)
    training = short(tiny)
    with pytest.raises(VlmflowError) as stopped:
        train(training, tmp_path / "runs", 2, "train_model r")
    assert not isinstance(stopped.value, PassingError)
    assert f"rank 0, {doing}, is in act (fault/before.py:" in stopped.value.cause
    assert "after step 4; after step 4 before, and resumed from step 2 since" in stopped.value.cause
    assert "the same command resumes from step 2" in stopped.value.next_step
    assert len([step for step, _ in losses_of(training, tmp_path / "runs") if step == 4]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_programs", "impatient")
def test_a_rank_that_the_kernel_has_stopped_is_said_not_to_answer(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint, a stage that must not resume ends; the same command may succeed."""
    make_fault(monkeypatch, tmp_path, "SIGSTOP", "step", 2, rank=1)
    with pytest.raises(PassingError, match=r"rank 1, training, does not answer \(after step 1\)"):
        train(short(tiny), tmp_path / "runs", 2, "train_smoke r", resumes=False)


def refused(training: Training, runs: Path) -> VlmflowError:
    with pytest.raises(VlmflowError) as stopped:
        train(training, runs, 2, "train_model r")
    assert not isinstance(stopped.value, PassingError)
    return stopped.value


@pytest.mark.parametrize(
    ("what", "said", "rank"),
    [
        ("loss", "the loss is not a finite number (loss nan)", 1),
        pytest.param("gradient", "the gradient's norm is not a finite number", 0, marks=pytest.mark.slow),
    ],
)
def test_a_step_without_a_finite_number_ends_the_training_before_it_is_saved(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, said: str, rank: int
) -> None:
    make_fault(monkeypatch, tmp_path, what, "step", 4, rank, once=False)
    training, runs = short(tiny), tmp_path / "r" / "full"
    error = refused(training, runs)
    assert f"train_model r: step 4: {said}" in error.cause
    assert "the last good checkpoint is that of step 2" in error.cause
    folder = runs / training.digest()
    assert [place.name for place in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    rows = {number: [row for batch in batches for row in batch] for number, batches in rows_of_step(folder, 4).items()}
    to_blame = rows[rank] if what == "loss" else rows[0] + rows[1]
    assert f"rows {', '.join(f'line {row + 1}' for row in sorted(to_blame))};" in error.cause
    assert "lower runs.NAME.train.learning_rate; or correct the rows (vlmflow rows r --step 4 shows" in error.next_step
    before = (folder / "progress.jsonl").read_text()
    assert str(refused(training, runs)) == str(error)
    assert (folder / "progress.jsonl").read_text() == before, "nothing is trained again"
    other = short(tiny, learning_rate=1e-3)
    assert other.digest() != training.digest(), "other settings are not refused"
    assert str(folder / BAD_STEP) in error.next_step


@pytest.mark.slow
def test_a_loss_that_explodes_ends_the_training(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After five such steps; one or two are allowed."""
    make_fault(monkeypatch, tmp_path, "exploded", "step", 13, rank=1, once=False)
    settings = {"max_steps": 30, "checkpoint_steps": 4, "evaluation_steps": 8, "keep_checkpoints": 9}
    training, runs = short(tiny, **settings), tmp_path / "runs"
    error = refused(training, runs)
    assert "step 17: the loss has exploded: " in error.cause
    assert "from step 13 on" in error.cause
    assert "the last good checkpoint is that of step 12" in error.cause
    assert max(step for step, _ in losses_of(training, runs)) == 16


@pytest.mark.slow
def test_a_rank_that_is_out_of_memory_ends_all_and_the_training_resumes_once(
    tiny: Tiny, unbroken: dict[str, dict[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: PyTorch's own error."""
    make_fault(monkeypatch, tmp_path, "out of memory", "step", 4, rank=1)
    training = short(tiny)
    check_equal(by_step(training, train(training, tmp_path / "runs", 2, "train_model r")), unbroken)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_programs", "impatient")
def test_a_training_that_hangs_after_sigterm_is_not_resumed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants it to end, as Ctrl-C does, would see it begin again."""
    make_fault(monkeypatch, tmp_path, "hang", "step", 4, rank=1)
    training, runs = short(tiny), tmp_path / "runs"
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if it is too late, it must not end the tests
    sender = threading.Thread(target=sigterm_to_this_process_when, args=[tmp_path / "fault" / "made"])
    sender.start()
    try:
        with pytest.raises(PassingError, match="no sign of life"):
            train(training, runs, 2, "train_model r")
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert (runs / training.digest() / "progress.jsonl").read_text().count('"begin"') == 1


def sigterm_to_this_process_when(exists: Path) -> None:
    give_up = time.monotonic() + 120
    while not exists.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
