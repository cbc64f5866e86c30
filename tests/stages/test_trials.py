"""The trials of a search, trained for real: they stop, go on, answer also when they fail, and are compared."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from made_accounts import some_stats
from simulated_evaluations import row
from tiny_models import file_names
from tiny_trainings import Tiny, losses_of
from vlmflow.config.search_settings import trained_with
from vlmflow.core.account import write_account
from vlmflow.core.errors import PassingError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import SplitFiles
from vlmflow.fetch.placed import MANIFEST, FileRecord, ModelManifest, digest_of
from vlmflow.rows.holdout import group_of, half_of
from vlmflow.search.best import decisive
from vlmflow.search.judge import FOLDER, Judgement, compared
from vlmflow.search.study import AskedTrial
from vlmflow.search.trial import (
    TRIES,
    Ended,
    Starts,
    Step,
    empty_slot,
    forget_tries,
    of_trial,
    one_start,
    run_trial,
    starts_of,
)
from vlmflow.supervisor.failures import TrainersDiedError
from vlmflow.supervisor.launch import ranks_of
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import Trained, train, trained_before
from vlmflow.swift.arguments import Training
from warm_programs import fresh
from workflow_runs import words_of

SEARCHED = {"learning_rate": 3e-3, "lora.rank": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.write(tmp_path_factory.mktemp("tiny"), vision=False)


def plan(tiny: Tiny, **settings: Any) -> Training:
    return tiny.training(max_steps=6, checkpoint_steps=2, evaluation_steps=2, **settings)


def asked(steps: int, hours: float | None = None, **settings: float) -> AskedTrial:
    return AskedTrial(number=3, settings=settings or SEARCHED, steps=steps, hours=hours)


def tried(asked: AskedTrial, training: Training, runs: Path) -> Ended:
    return run_trial(asked, of_trial(training, asked), runs, 1, "s")


def test_a_trial_that_stops_goes_on_as_if_it_had_not_stopped(tiny: Tiny, tmp_path: Path) -> None:
    training = plan(tiny)
    own = replace(training, settings=trained_with(training.settings, SEARCHED))
    folder = tmp_path / own.digest()

    first = tried(asked(2), training, tmp_path).result
    assert (first.state, first.steps, [step for step, _ in first.curve]) == ("done", 2, [2])
    assert first.value == first.curve[0][1]
    assert first.mem_mb is not None
    assert first.mem_mb > 50
    assert first.gpu_hours == first.hours > 0

    stopped = tried(asked(6, hours=0.0002), training, tmp_path).result
    assert (stopped.state, stopped.value) == ("stopped", None)
    assert "hours are over" in str(stopped.reason)
    assert 2 < stopped.steps < 6
    assert stopped.hours > 0.0002, "loading counts, too"
    begun = (folder / "trainer.log").stat().st_size
    again = tried(asked(6, hours=0.0002), training, tmp_path).result
    assert (again.state, again.steps) == ("stopped", stopped.steps)
    assert (folder / "trainer.log").stat().st_size == begun, "no hours are left: nothing is started"

    last = tried(asked(6, hours=1), training, tmp_path)
    assert (last.result.state, last.result.steps) == ("done", 6)
    assert last.result.hours > stopped.hours, "an attempt of the same step counts, the step before does not"
    assert last.trained is not None

    assert trained_before(of_trial(training, asked(6)), tmp_path) == last.trained
    assert trained_before(of_trial(training, asked(6, learning_rate=1e-3)), tmp_path) is None

    straight = train(own, tmp_path / "straight", 1, "straight")
    once = dict(losses_of(own, tmp_path))
    assert once == dict(losses_of(own, tmp_path / "straight"))
    assert len(once) == 6
    name = "adapter_model.safetensors"
    assert sha256_of(last.trained.best.folder / name) == sha256_of(straight.best.folder / name)
    # It had its hours: asked again with fewer, it is still done, and nothing is trained.
    again = tried(asked(6, hours=1e-9), training, tmp_path).result
    assert (again.state, again.value, again.curve) == ("done", last.result.value, last.result.curve)
    assert again.hours == pytest.approx(last.result.hours, abs=1e-3)
    # Its first result is deleted and made again: nothing is trained, and nothing of the later steps is in it.
    again = tried(asked(2), training, tmp_path).result
    assert (again.state, again.steps, again.curve, again.value) == ("done", 2, first.curve, first.value)
    assert again.hours == pytest.approx(first.hours, abs=1e-3), "not those of the later steps"
    assert starts_of(Step(RunFolder(folder), "s", 2)).tries == 0


def test_a_training_that_cannot_go_on_is_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    failed = tried(asked(6, learning_rate=1e37), plan(tiny), tmp_path).result
    assert (failed.state, failed.value) == ("failed", None)
    assert "finite" in str(failed.reason) or "exploded" in str(failed.reason)
    assert all(math.isfinite(loss) for _, loss in failed.curve)
    again = tried(asked(6, learning_rate=1e37), plan(tiny), tmp_path).result
    assert again == failed, "its hours, too: the account of the study stays the same"


@contextmanager
def kernel_that_kills_trainers() -> Iterator[list[int]]:
    """Send SIGKILL to each trainer as soon as it is there, as the kernel does without memory; yields their ids."""
    over, hit = threading.Event(), list[int]()
    me = psutil.Process()

    def kill() -> None:
        while not over.is_set():
            with suppress(psutil.Error):
                torchruns = [child for child in me.children() if "torch.distributed.run" in words_of(child)]
                for trainer in (each for torchrun in torchruns for each in ranks_of(torchrun).values()):
                    if trainer.pid not in hit:
                        hit.append(trainer.pid)
                        trainer.send_signal(signal.SIGKILL)
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield hit
    finally:
        over.set()
        killer.join()


def test_a_trainer_that_the_kernel_kills_again_and_again_is_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    training = plan(tiny)
    with fresh(), kernel_that_kills_trainers() as hit:
        result = tried(asked(6), training, tmp_path).result
    assert len(hit) == TRIES
    assert (result.state, result.value) == ("failed", None)
    assert "SIGKILL" in str(result.reason)
    assert result.hours > 0
    # Whoever removes the answer, after adding memory, gets another try.
    assert tried(asked(2), training, tmp_path).result.state == "done"


def test_an_error_of_the_trainers_own_is_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    training = plan(tiny, swift_args={"template": "qwen3", "optim": "no_such_optimizer"})
    result = tried(asked(6), training, tmp_path).result
    assert result.state == "failed"
    assert "no_such_optimizer" in str(result.reason)


def test_one_that_ends_without_a_word_again_and_again_is_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    """Nobody is left to say that memory ran out, where a pod is killed as a whole."""
    training = plan(tiny)
    own = replace(training, settings=trained_with(training.settings, SEARCHED))
    step = Step(RunFolder(tmp_path / own.digest()), "s", 6)
    write_account(step.file, Starts(TRIES, 0, 60.0, None))
    result = tried(asked(6), training, tmp_path).result
    assert (result.state, result.hours) == ("failed", 60 / 3600)
    assert "without a word" in str(result.reason)
    assert starts_of(step).tries == 0, "asked again, it is tried again"


def test_starts_are_counted_and_timed(tmp_path: Path) -> None:
    step = Step(RunFolder(tmp_path / "run"), "s", 4)
    file, trainer_log = step.file, step.folder.trainer_log
    assert starts_of(step) == Starts(0, 0, 0.0, None)
    with one_start(step):
        silent = starts_of(step)  # what a later process finds if this one is killed here
        assert (silent.tries, silent.seconds) == (1, 0.0)
        trainer_log.write_text("loading\n")
        os.utime(trainer_log, (time.time() + 50, time.time() + 50))  # the clock of another machine is ahead
        assert starts_of(step).seconds < 30
        write_account(file, Starts(1, 0, 3.0, time.time() - 120))
        os.utime(trainer_log, (time.time() - 10, time.time() - 10))
        assert starts_of(step).seconds == pytest.approx(113, abs=30)
    ended = starts_of(step)
    assert (ended.tries, ended.since) == (0, None)
    assert ended.seconds < 30
    assert starts_of(replace(step, steps=8)) == Starts(0, 0, 0.0, None), "each step has its own"
    with pytest.raises(TrainersDiedError), one_start(step):
        raise TrainersDiedError("a cause", "a step")
    assert starts_of(step).tries == 1
    with pytest.raises(PassingError), one_start(step):
        raise PassingError("SIGTERM", "run the same command again")
    assert starts_of(step).tries == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    forget_tries(step)
    assert starts_of(step).tries == 0
    write_account(file, Starts(1, 0, 60.0, None))
    with one_start(step):
        pass
    assert 60 < starts_of(step).seconds < 90


def test_an_empty_slot_has_its_reason() -> None:
    result = empty_slot("the budget is spent")
    assert (result.state, result.number, result.reason) == ("empty", None, "the budget is spent")


ROWS, MEASURED = 210, 40
"""Rows of val, and how many are drawn from the half that judges."""

OWN, BEST = 1e-7, 1e-2
"""Learning rates: with the first the model stays as it was."""


def test_the_best_trial_is_compared_with_the_runs_own_settings_on_rows_that_chose_neither(tmp_path: Path) -> None:
    tiny = Tiny.write(tmp_path, vision=False)
    rows = [row(number, ("red", "green", "blue")[number % 3]) for number in range(ROWS)]
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in rows)
    val, stats, model = tmp_path / "data" / "val.jsonl", tmp_path / "data" / "stats.json", tmp_path / "model"
    val.parent.mkdir()
    val.write_bytes(lines)
    (tmp_path / "train.jsonl").write_bytes(lines)
    write_account(stats, some_stats(kind="alpaca", digests={val.name: sha256_of(val)}))
    base = tmp_path / "base"
    files = {name: FileRecord((base / name).stat().st_size, sha256_of(base / name)) for name in file_names(base)}
    write_account(model / MANIFEST, ModelManifest("tiny", str(base), None, base, files, [], digest_of(files)))

    def trial(rate: float) -> tuple[Trained, Training]:
        training = tiny.training(max_steps=4, checkpoint_steps=4, evaluation_steps=4)
        own = replace(training, settings=trained_with(training.settings, {"learning_rate": rate}))
        return train(own, tmp_path / "runs", 1, "a trial"), own

    how = Judgement("r", SplitFiles(val, stats, tmp_path), MEASURED, True, tmp_path / "evaluations", 1, halved=True)
    own, best = trial(OWN), trial(BEST)
    figures, chose_nothing = compared(own, best, model, how)

    judges = half_of((group_of(each, {}) for each in rows), "judges")
    assert judges is not None
    wanted = how.chosen(own[1], "judges")[0].rows
    assert {each.case.group for each in wanted} < judges
    assert not {each.case.group for each in how.chosen(own[1], "chooses")[0].rows} & judges
    kept = [line for file in (tmp_path / "evaluations").rglob("*.jsonl") for line in file.read_bytes().splitlines()]
    assert {msgspec.json.decode(line)["key"] for line in kept} == {each.work.key for each in wanted}
    assert chose_nothing
    assert figures.rows == MEASURED
    lost = decisive("eval_loss", figures)
    assert lost.difference.mean < -0.1, "the first model learned nothing, the other how answers begin"
    assert figures.uses_feedback is not None
    for trained, _ in (own, best):
        assert not (trained.folder.path / FOLDER).exists(), "the merged weights go"
