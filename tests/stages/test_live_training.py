"""A real training writes its page while it runs."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_training_ends import job

from browser import Browser
from vlmflow.core.errors import PassingError
from vlmflow.reports import training_pages
from vlmflow.supervisor.progress import LocalRun, local_runs
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import train
from warm_programs import fresh_torchrun


@contextmanager
def followed(page: Path) -> Iterator[list[str]]:
    """Yield a list that gets each content of the page; every one of them must be whole."""
    seen, ended = [""], threading.Event()

    def follow() -> None:
        while not ended.wait(0.02):
            if page.exists() and (text := page.read_text()) != seen[-1]:
                seen.append(text)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield seen
    finally:
        time.sleep(0.1)
        ended.set()
        thread.join()
        assert all(text.endswith("</html>\n") for text in seen[1:])


def states(pages: list[str]) -> list[str]:
    """Return what the training did, without repetitions."""
    found = [re.findall(r'<p class="verdict \w+"><b>(\w+)</b>', page)[0] for page in pages[1:]]
    return [state for state, before in zip(found, ["", *found], strict=False) if state != before]


@pytest.mark.slow
def test_the_page_shows_a_training_as_it_goes_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted by SIGTERM after its second step, and resumed."""
    monkeypatch.setattr(training_pages, "MOST_TIME", 1.0)
    training = job(tmp_path, 8, 2, 1, max_steps=6, checkpoint_steps=2, evaluation_steps=2)
    runs = tmp_path / "runs" / "r" / "full"
    folder = RunFolder(runs / training.digest())
    onlooker = training_pages.LivePage("r", "full", training.settings, every=0.05).refresh

    stopped: list[bool] = []
    seen: list[LocalRun] = []

    def stop_after_two_steps(folder: RunFolder, runs: bool) -> None:
        onlooker(folder, runs)
        if runs:
            seen.extend(local_runs(folder.path.parents[2]))
        if not stopped and folder.progress.exists() and b'"step": 2, "target"' in folder.progress.read_bytes():
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    with fresh_torchrun(), followed(folder.page) as pages, pytest.raises(PassingError, match="interrupted"):
        train(training, runs, 2, "train_model r", onlooker=stop_after_two_steps)
    assert states(pages)[0] == "starting"
    assert states(pages)[-1] == "interrupted"
    assert {"training", "evaluating", "saving"} & set(states(pages))
    assert {(one.run, one.stage) for one in seen} == {("r", "full")}
    assert seen[0].doing == "starting"
    assert seen[-1].newest.step >= 2
    assert local_runs(tmp_path / "runs") == []

    with followed(folder.page) as pages:
        train(
            training, runs, 2, "train_model r", onlooker=training_pages.LivePage("r", "full", training.settings).refresh
        )
    assert states(pages)[:2] == ["interrupted", "starting"]
    assert states(pages)[-1] == "ended"
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(folder.page, "r: full run, step 6 of 6")
        text = browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.querySelectorAll('svg').length") >= 4
    assert "ended\n" in text
    assert re.search(r"sessions\n2\n", text)


@pytest.mark.slow
def test_a_training_ends_well_although_its_page_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = job(tmp_path, 4, 2, 1, max_steps=2)
    folder = RunFolder(tmp_path / "runs" / training.digest())
    folder.page.mkdir(parents=True)
    trained = train(
        training,
        tmp_path / "runs",
        2,
        "train_model r",
        onlooker=training_pages.LivePage("r", "full", training.settings).refresh,
    )
    assert trained.last.step == 2
    assert len([said for said in caplog.messages if "run.html cannot be written" in said]) == 1
