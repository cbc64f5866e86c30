"""The steps of a search: failures, rungs, limits, the budget, spaces that are asked whole, starts of trials."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from made_accounts import compared
from made_search import LENGTHS, OWN_RATE, TRAIN, asked_in, best_unjudged, result, searched
from vlmflow.config.after_training import ChosenBy
from vlmflow.config.search_settings import SearchLimits, SearchSettings
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import Compared
from vlmflow.search.best import best_of, overlay, read_judged, refuse_other_results
from vlmflow.search.propose import (
    ASKED_BEFORE,
    SPENT,
    Schedule,
    propose,
    refuse_equal_rungs,
    refuse_too_much,
    trainings_of,
)
from vlmflow.search.study import AskedTrial, Study, StudyTrial, TrialResult, read_asked, with_step
from vlmflow.search.trial import KeptResult, Starts, Step, one_start, starts_of, wait_for_others
from vlmflow.supervisor.run_folder import RunFolder
from workflow_runs import ROOT


def settings(**other: Any) -> SearchSettings:
    space = {"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "lora.rank": [8, 16]}
    return SearchSettings.model_validate({"run": "r", "space": space, "rounds": 2, "together": 3} | other)


def by_rate(asked: AskedTrial) -> TrialResult:
    """The lower the learning rate, the better."""
    return result(asked, 1000 * asked.settings["learning_rate"])


NOT_SHOWN = "; not shown to beat the run's own settings"


def best_in(study: Study, search: SearchSettings) -> StudyTrial:
    return best_of(study, best_unjudged(study, search.limits).chosen, search.limits)


def test_failed_and_stopped_trials_are_told_and_are_never_the_best(tmp_path: Path) -> None:
    def answer(asked: AskedTrial) -> TrialResult:
        if asked.number in (1, 5):
            return result(asked, None, state="failed", reason="out of memory", steps=3)
        if asked.number == 2:
            return result(asked, 0.0, state="stopped", reason="its hours were over", steps=30)
        if asked.number == 3:
            return result(asked, float("nan"), curve=[])
        return by_rate(asked)

    study = searched(tmp_path, settings(), answer)
    assert [trial.state for trial in study.trials] == ["done", "failed", "stopped", "failed", "done", "failed", "done"]
    assert study.trials[3].reason == "its value is no finite number"
    assert study.trials[1].reason == "out of memory"
    best = best_in(study, settings())
    assert best.value == min(study.trials[number].value or 0 for number in (0, 4, 6))


def test_a_search_without_a_result_says_what_became_of_its_trials(tmp_path: Path) -> None:
    study = searched(
        tmp_path, settings(rounds=1), lambda asked: result(asked, None, state="failed", reason="out of memory")
    )
    assert study.importances is None
    with pytest.raises(VlmflowError, match=r"no trial trained to its end .*4 failed.*out of memory"):
        best_in(study, settings())


def test_the_best_third_of_each_rung_goes_on_from_the_same_schedule(tmp_path: Path) -> None:
    search = settings(rounds=2, together=7, rungs=3)
    study = searched(tmp_path, search, by_rate)
    for number in range(2):
        first, second, third = (asked_in(tmp_path, number, rung).trials for rung in range(3))
        if number == 0:  # trial 0, with the run's own settings, goes on whatever its value
            own = [rung.pop(0) for rung in (first, second, third)]
            assert [(trial.number, trial.settings["learning_rate"]) for trial in own if trial] == [(0, OWN_RATE)] * 3
        assert [len(first), len(second), len(third)] == [7, 3, 1]
        rates = sorted(trial.settings["learning_rate"] for trial in first if trial)
        assert [trial.settings["learning_rate"] for trial in second if trial] == rates[:3]
        assert [trial.settings["learning_rate"] for trial in third if trial] == rates[:1]
        assert [{trial.steps for trial in rung if trial} for rung in (first, second, third)] == [{10}, {30}, {90}]
    states = [trial.state for trial in study.trials]
    assert (states.count("done"), states.count("left")) == (3, 12)
    done = next(trial for trial in study.trials if trial.state == "done")
    assert (done.hours, [step for step, _ in done.rungs]) == (3.0, [10, 30, 90])


def test_steps_are_those_of_an_evaluation_and_follow_the_trials_settings() -> None:
    train = TRAIN.model_copy(update={"max_steps": None, "epochs": 4})
    schedule = Schedule(train, len(LENGTHS), 2)
    assert schedule.stops({"gradient_accumulation_steps": 2}, 2) == [30, 64]  # a third of 64 is 22
    assert schedule.stops({"gradient_accumulation_steps": 8}, 2) == [10, 16]


def test_rungs_that_end_at_the_same_evaluation_are_refused() -> None:
    """They cost as many whole trainings, and were booked twice."""
    space = {"gradient_accumulation_steps": [1, 4], "learning_rate": {"low": 1e-5, "high": 1e-2}}
    search = settings(space=space, rungs=3)
    train = TRAIN.model_copy(update={"max_steps": None, "epochs": 4})
    own = {"gradient_accumulation_steps": 1}
    refuse_equal_rungs("s", search, Schedule(train, len(LENGTHS) * 9, 2), own)
    with pytest.raises(VlmflowError, match=r"search.s.rungs: 3, .* at the steps 10, 10, 20"):
        refuse_equal_rungs("s", search, Schedule(train, len(LENGTHS) * 9, 2), {"gradient_accumulation_steps": 64})
    with pytest.raises(VlmflowError, match=r"search.s.rungs: 3, .* at the steps 20, 20, 32") as refused:
        refuse_equal_rungs(
            "s", search, Schedule(train.model_copy(update={"evaluation_steps": 20}), len(LENGTHS), 2), own
        )
    both = "set evaluation_steps and checkpoint_steps of runs.r.train to 3 or less, or lower search.s.rungs"
    assert refused.value.next_step == both, "an evaluation comes only with a checkpoint"
    often = train.model_copy(update={"evaluation_steps": 20, "checkpoint_steps": 1})
    with pytest.raises(VlmflowError) as refused:
        refuse_equal_rungs("s", search, Schedule(often, len(LENGTHS), 2), own)
    assert refused.value.next_step == "set evaluation_steps of runs.r.train to 3 or less, or lower search.s.rungs"


def test_a_trial_above_a_limit_does_not_go_on_and_is_not_the_best(tmp_path: Path) -> None:
    search = settings(rounds=2, together=3, rungs=2, limits={"mem_mb": 500, "hours": 5})

    def answer(asked: AskedTrial) -> TrialResult:
        found = by_rate(asked)
        return structs.replace(found, mem_mb=501.0, value=0.0) if asked.number == 1 else found

    study = searched(tmp_path, search, answer)
    assert not study.trials[1].within(search.limits)
    assert study.trials[1].state == "left"
    assert best_in(study, search).number != 1
    assert {trial.hours for trial in asked_in(tmp_path, 0, 0).trials if trial} == {5.0}
    assert {trial.hours for trial in asked_in(tmp_path, 0, 1).trials if trial} == {4.0}


def test_a_spent_budget_asks_nothing_more_and_what_is_left_is_shared(tmp_path: Path) -> None:
    search = settings(rounds=3, together=3, limits={"gpu_hours": 7})
    study = searched(tmp_path, search, by_rate)
    assert [trial.hours for trial in asked_in(tmp_path, 0).trials if trial] == [7 / 4] * 4
    assert [trial.hours for trial in asked_in(tmp_path, 1).trials if trial] == [1.0] * 3
    assert (asked_in(tmp_path, 2).trials, asked_in(tmp_path, 2).empty) == ([None] * 3, SPENT)
    assert (study.gpu_hours, [one.reason for one in study.empty]) == (7.0, [SPENT])
    assert best_in(study, search).state == "done"


def test_what_is_left_is_shared_by_the_trials_that_go_on(tmp_path: Path) -> None:
    """Slots that stay empty get nothing."""
    search = settings(rounds=1, together=9, rungs=2, limits={"gpu_hours": 31})

    def answer(asked: AskedTrial) -> TrialResult:
        return by_rate(asked) if asked.number == 4 else result(asked, None, state="failed", reason="no memory")

    searched(tmp_path, search, answer)
    assert [trial and (trial.number, trial.hours) for trial in asked_in(tmp_path, 0, 1).trials] == [
        (4, 21),
        None,
        None,
        None,
    ]


def test_trials_that_wait_when_the_budget_ends_are_left(tmp_path: Path) -> None:
    study = searched(tmp_path, settings(rounds=1, rungs=2, limits={"gpu_hours": 4}), by_rate)
    assert {(trial.state, trial.reason) for trial in study.trials} == {("left", SPENT)}


def test_a_space_of_few_combinations_is_asked_once_each(tmp_path: Path) -> None:
    search = settings(space={"lora.rank": [8, 16], "lora.dora": [True, False]}, rounds=2)
    study = searched(tmp_path, search, lambda asked: result(asked, float(asked.settings["lora.rank"])))
    asked = [tuple(trial.settings.values()) for trial in study.trials]
    assert sorted(asked) == [(False, 8), (False, 16), (True, 8), (True, 16)]
    assert study.trials[0].settings == {"lora.dora": True, "lora.rank": 8}, "the run's own are not asked again"
    assert asked_in(tmp_path, 1).empty == ASKED_BEFORE
    assert [trial is None for trial in asked_in(tmp_path, 1).trials].count(True) == 3


def test_a_search_that_needs_more_than_its_budget_is_refused_with_both_figures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = settings(rounds=2, together=3, limits={"gpu_hours": 100})
    with pytest.raises(VlmflowError, match=r"search.s.limits.gpu_hours: 100, .* need 140 to 280 GPU-hours"):
        refuse_too_much("s", search, (10.0, 20.0), 2, [90])
    refuse_too_much("s", search, (5.0, 10.0), 2, [90])
    assert "need 70 to 140 GPU-hours; when they are spent" in caplog.text
    refuse_too_much("s", settings(), (1000.0, 2000.0), 2, [90])


def test_a_rung_costs_what_it_trains_beyond_the_rung_before() -> None:
    assert trainings_of(settings(rounds=4, together=3), [90]) == 13
    nine = settings(rounds=1, together=9, rungs=3)
    assert trainings_of(nine, [10, 30, 90]) == pytest.approx(9 / 9 + 3 * (1 / 3 - 1 / 9) + 1 * (1 - 1 / 3) + 1)


def test_the_result_of_another_trial_is_refused(tmp_path: Path) -> None:
    searched(tmp_path, settings(rounds=1), by_rate)
    asked = asked_in(tmp_path, 0)
    trials = [trial for trial in asked.trials if trial]
    with pytest.raises(
        VlmflowError, match=r"round 0, rung 0: 0.json is the result of trial 1 at step 90, but trial 0 was asked"
    ):
        with_step(None, asked, [by_rate(trial) for trial in (trials[1], trials[0], *trials[2:])], 1, SearchLimits())


def test_a_result_that_changed_after_the_study_learned_from_it_is_refused(tmp_path: Path) -> None:
    study = searched(tmp_path, settings(rounds=1), by_rate)
    results = [tmp_path / f"search/s/0/0/{slot}.json" for slot in range(4)]
    refuse_other_results(study, tmp_path, results)
    results[1].write_text(results[1].read_text() + "\n")
    with pytest.raises(VlmflowError, match=r"made from other results: 0/0/1.json"):
        refuse_other_results(study, tmp_path, results)


@pytest.mark.parametrize(
    ("compared", "shown"),
    [(compared(0.5, 0.3), ""), (compared(0.5, 0.49), NOT_SHOWN), (None, NOT_SHOWN)],
)
def test_the_overlay_gives_the_run_the_best_values(tmp_path: Path, compared: Compared | None, shown: str) -> None:
    study = searched(tmp_path, settings(), by_rate)
    judged = structs.replace(best_unjudged(study, settings().limits), compared=compared)
    best = best_of(study, judged.chosen, settings().limits)
    text = overlay(study, judged, best, "my-run", 42)
    content = yaml.safe_load(text)
    named = content["runs"]["my-run"].pop("chosen_by")
    words = ChosenBy.model_validate(named).in_words()
    assert re.fullmatch(
        rf"search \S+, trial {best.number} \(best of \d+{shown}\), study.json with sha256 [0-9a-f]{{64}}", words
    )
    assert named["settings"] == best.settings
    assert content == {
        "runs": {
            "my-run": {
                "train": {
                    "learning_rate": best.settings["learning_rate"],
                    "lora": {"rank": best.settings["lora.rank"]},
                }
            }
        }
    }
    assert f"# trial: {best.number} (round {best.round}, step 90)" in text
    assert (
        f"# eval_loss: {best.value!r}, by the rows of val that chose among trials and checkpoints: too good\n" in text
    )
    assert f"\n# {judged.sentence}\n" in text


def test_the_overlay_has_the_runs_own_settings_if_no_trial_beats_them(tmp_path: Path) -> None:
    study = searched(tmp_path, settings(rounds=1), by_rate)
    judged = structs.replace(best_unjudged(study, settings().limits), chosen=0, sentence="Keep them.")
    text = overlay(study, judged, best_of(study, judged.chosen, settings().limits), "r", 42)
    content = yaml.safe_load(text)["runs"]["r"]
    assert content["train"] == {"learning_rate": OWN_RATE, "lora": {"rank": 8}}
    assert "# trial: 0 (round 0, step 90, the run's own settings)" in text
    assert "# Keep them." in text
    words = ChosenBy.model_validate(content["chosen_by"]).in_words()
    assert words.startswith("search s, trial 0 (the run's own settings; none of 4 is shown to beat them)")


def test_what_became_of_the_best_trial_of_another_study_is_refused(tmp_path: Path) -> None:
    study = searched(tmp_path, settings(rounds=1), by_rate)
    file, account = tmp_path / "judged.json", tmp_path / "search/s/0/0/study.json"
    write_account(file, structs.replace(best_unjudged(study, settings().limits), study=sha256_of(account)))
    assert read_judged(file, account).best is not None
    account.write_text(account.read_text() + "\n")
    with pytest.raises(VlmflowError, match=r"judged.json: it is of another .*study.json"):
        read_judged(file, account)


@pytest.mark.parametrize("own", [{"learning_rate": 0.5, "lora.rank": 8}, {"learning_rate": 1e-4, "lora.rank": 64}])
def test_own_settings_outside_the_space_are_trial_0_and_teach_the_sampler_nothing(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    """Optuna has no value for them."""
    search = settings(rounds=4, together=3)
    study = searched(tmp_path, search, by_rate, own=own)
    assert study.trials[0].settings == own
    assert (study.trials[0].state, [trial.number for trial in study.trials]) == ("done", list(range(13)))
    assert study.importances is not None
    others = searched(tmp_path / "others", search, by_rate, own=own | {"learning_rate": 0.7, "lora.rank": 128})
    assert [trial.settings for trial in others.trials[1:]] == [trial.settings for trial in study.trials[1:]]


def test_the_sampler_learns_from_own_settings_in_the_space(tmp_path: Path) -> None:
    """It has five results after the first round, with those of trial 0, and knows which of them are good."""
    search = settings(rounds=2, together=4)
    for name, good in (("good", 0.0), ("bad", 100.0)):
        searched(
            tmp_path / name,
            search,
            lambda asked, good=good: result(asked, good) if asked.number == 0 else by_rate(asked),
        )
    good, bad = (asked_in(tmp_path / name, 1).trials for name in ("good", "bad"))
    assert good != bad


def test_the_highest_share_is_the_best(tmp_path: Path) -> None:
    """Optuna minimises; what people read is the share itself."""
    search = settings(rounds=2, together=3, rungs=2, objective="uses_feedback")
    study = searched(tmp_path, search, by_rate)
    best = best_in(study, search)
    assert best.value == max(trial.value or 0 for trial in study.trials if trial.state == "done")
    first, second = (asked_in(tmp_path, 0, rung).trials for rung in range(2))
    rates = sorted(trial.settings["learning_rate"] for trial in first if trial and trial.number)
    assert [trial.settings["learning_rate"] for trial in second if trial and trial.number] == rates[-1:]
    told = [json.loads(line) for line in (tmp_path / "search/s/1/1/study.journal").read_text().splitlines()]
    values = {value for line in told for value in line.get("values") or []}
    assert -(best.value or 0) in values
    assert values <= {-value for trial in study.trials for _, value in trial.rungs}


def test_a_study_or_a_journal_of_another_step_is_refused(tmp_path: Path) -> None:
    search = settings(rounds=2, together=3)
    study = searched(tmp_path, search, by_rate, last=(0, 0))
    journal, new = tmp_path / "search/s/0/0/study.journal", tmp_path / "new.journal"
    schedule = Schedule(TRAIN, len(LENGTHS), 1)
    with pytest.raises(VlmflowError, match="the study before it is that of search s, round 0, rung 0"):
        propose(search, study, journal, new, schedule, 1, step=("s", 2, 0), own=None)
    journal.write_text("")
    with pytest.raises(VlmflowError, match=r"study.journal: it is not the journal of its study.json, .* trial 0"):
        propose(search, study, journal, new, schedule, 1, step=("s", 1, 0), own=None)
    journal.write_text("{")
    with pytest.raises(VlmflowError, match=r"0/0/study.journal: .*") as damaged:
        propose(search, study, journal, new, schedule, 1, step=("s", 1, 0), own=None)
    assert "remove search/s" in damaged.value.next_step


def test_all_combinations_of_lists_are_asked(tmp_path: Path) -> None:
    """The sampler repeats those that it likes: of 100, five were never asked."""
    space = {"lora.rank": [2, 4, 8, 16, 32, 64], "lora.alpha": [8, 16, 32, 64, 128]}
    search = settings(space=space, rounds=4, together=8)
    study = searched(tmp_path, search, lambda asked: result(asked, float(asked.settings["lora.rank"])))
    assert len({tuple(trial.settings.values()) for trial in study.trials}) == len(study.trials) == 30


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_hours_that_cannot_be_are_refused(tmp_path: Path, number: float) -> None:
    asked = AskedTrial(number=0, settings={}, steps=10, hours=None)
    write_account(tmp_path / "0.json", result(asked, 1.0, gpu_hours=number))
    with pytest.raises(VlmflowError, match=r"0.json: gpu_hours"):
        read_account(tmp_path / "0.json", TrialResult)


def test_more_steps_than_can_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounds, rungs: 100 times 3"):
        settings(rounds=100, rungs=3)


@pytest.mark.parametrize(
    "change",
    [
        {"search": "other"},
        {"search": "s/../.."},
        {"rung": 1},
        {"trials": []},
        {"trials": [{"number": 0, "settings": {}, "steps": 1, "hours": None}] * 2},
        {"trials": [{"number": -1, "settings": {}, "steps": 1, "hours": None}]},
        {"trials": [{"number": 1, "settings": {}, "steps": 1, "hours": -1}]},
    ],
)
def test_an_account_that_is_not_of_its_step_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    searched(tmp_path, settings(rounds=1), by_rate)
    file = tmp_path / "search" / "s" / "0" / "0" / "asked.json"
    read_asked(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VlmflowError, match=re.escape(str(file))):
        read_asked(file)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"no journal\n"])
def test_a_damaged_journal_is_named_without_a_traceback(
    tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    search = settings(rounds=2)
    study = searched(tmp_path, search, by_rate, last=(0, 0))
    journal = tmp_path / "search" / "s" / "0" / "0" / "study.journal"
    journal.write_bytes(content)
    capfd.readouterr()
    schedule = Schedule(TRAIN, len(LENGTHS), 1)
    asked = tmp_path / "asked.journal"
    with pytest.raises(VlmflowError, match=re.escape(str(journal))) as refused:
        propose(search, study, journal, asked, schedule, 1, step=("s", 1, 0), own=None)
    assert "remove search/s" in refused.value.next_step
    assert "Traceback" not in "".join(capfd.readouterr())


START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from vlmflow.search.trial import Step, one_start
from vlmflow.supervisor.run_folder import RunFolder

def send():
    signal.raise_signal(signal.SIGTERM)

if sys.argv[2] == "fork":
    os.register_at_fork(after_in_parent=send)
with one_start(Step(RunFolder(Path(sys.argv[1])), "s", 4)):
    time.sleep(0.1)
    if sys.argv[2] == "fork":
        subprocess.run(["true"], preexec_fn=lambda: None)
    else:
        send()
    print("it goes on")
"""


@pytest.mark.parametrize("when", ["in the block", "fork"])
def test_sigterm_ends_a_start_and_is_recorded(tmp_path: Path, when: str) -> None:
    """Also while it starts a process: Python drops what a handler of signals raises there."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path), when],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    ended = starts_of(Step(RunFolder(tmp_path), "s", 4))
    assert (ended.tries, ended.since) == (0, None)
    assert ended.seconds >= 0.1


def test_a_killed_start_that_still_trains_is_waited_for_and_its_hours_count(tmp_path: Path) -> None:
    """Its trainers hold the folder, and save, when the same command is called again at once."""
    step = Step(RunFolder(tmp_path), "s", 4)
    step.file.parent.mkdir()
    free = threading.Event()

    def train() -> None:
        with step.folder.held({}):
            free.wait(30)
            step.folder.trainer_log.write_text("saved\n")

    other = threading.Thread(target=train)
    other.start()
    while not step.folder.holder():
        time.sleep(0.01)
    write_account(step.file, Starts(1, 0, 10.0, time.time() - 3600))
    threading.Timer(1, free.set).start()
    wait_for_others(step.folder)
    assert free.is_set()
    assert starts_of(step).seconds == pytest.approx(3611, abs=30)
    other.join()


def test_each_search_has_its_own_starts(tmp_path: Path) -> None:
    """With the same settings two searches train in one folder."""
    mine, others = (Step(RunFolder(tmp_path), name, 4) for name in ("mine", "others"))
    mine.file.parent.mkdir()
    write_account(mine.file, Starts(1, 0, 10.0, None))
    assert starts_of(others) == Starts(0, 0, 0.0, None)


def test_a_killed_start_of_another_search_gets_no_hours_of_this_one(tmp_path: Path) -> None:
    mine, others = (Step(RunFolder(tmp_path), name, 4) for name in ("mine", "others"))
    others.file.parent.mkdir()
    write_account(others.file, Starts(1, 0, 0.0, time.time() - 36000))
    log = mine.folder.trainer_log
    log.write_text("loading\n")
    os.utime(log, (time.time() - 35000, time.time() - 35000))
    with one_start(mine):
        log.write_text("step 1\n")
    assert starts_of(others).seconds == pytest.approx(1000, abs=30)


def test_what_another_search_trained_costs_no_hours() -> None:
    asked = AskedTrial(number=7, settings={"learning_rate": 0.1}, steps=10, hours=None)
    kept = KeptResult("others", result(AskedTrial(number=2, settings={}, steps=10, hours=None), 0.5, hours=3.0))
    found = kept.of("mine", asked)
    assert (found.number, found.settings, found.value) == (7, {"learning_rate": 0.1}, 0.5)
    assert (found.hours, found.gpu_hours) == (0, 0)
    assert (kept.of("others", asked).hours, kept.of("others", asked).gpu_hours) == (3.0, 1.0)
