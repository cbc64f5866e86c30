"""The page of a training while it runs, written beside it and shown by a browser."""

import math
import re
import time
from pathlib import Path

import pytest

from browser import Browser
from vlmflow.config.run_settings import TrainSettings
from vlmflow.in_trainer.messages import Begin, End, Event, Log, as_line
from vlmflow.reports import training_pages
from vlmflow.reports.training_pages import LivePage, RunHistory
from vlmflow.reports.training_pages import live_page as page_of
from vlmflow.supervisor.run_folder import RunFolder

HOSTILE = "<script>document.title='taken'</script>"
SETTINGS = TrainSettings(checkpoint_steps=10, evaluation_steps=20)


def events(steps: int, target: int, begin: int = 0) -> list[Event]:
    """Return a session that made steps up to `steps`: one second and 100 tokens each, a tenth of it waiting."""
    session: list[Event] = [Begin(begin, target, 100 * begin, 2, "DISTRIBUTED", "cpu")]
    for step in range(begin + 1, steps + 1):
        at = float(step - begin)
        figures = {"learning_rate": 1e-4 * (1 - step / target), "grad_norm": 1 + step % 3, "waited": at / 10}
        session.append(
            Log(at, step, target, 100 * step, loss=4 - 2 * step / target, memory=3_000_000_000 + step, **figures)
        )
        if step % 20 == 0:
            session.append(Log(at, step, target, 100 * step, eval_loss=4 - step / target))
    return session


def write(folder: RunFolder, more: list[Event]) -> None:
    with folder.progress.open("a") as file:
        file.writelines(map(as_line, more))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return RunFolder(tmp_path / "run")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the page at every call."""
    monkeypatch.setattr(training_pages, "MOST_TIME", math.inf)


def state(folder: RunFolder) -> str:
    (found,) = re.findall(r'<p class="verdict \w+"><b>(\w+)</b>', folder.page.read_text())
    return found


def tile(folder: RunFolder, label: str) -> str:
    (found,) = re.findall(rf">{label}</span>\n<b>(.*)</b>", folder.page.read_text())
    return found


@pytest.mark.usefixtures("at_once")
def test_it_follows_a_training_from_its_start_to_its_end(folder: RunFolder) -> None:
    page = LivePage("my-run", "full", SETTINGS, every=0)
    page.refresh(folder, True)
    assert state(folder) == "starting"
    assert 'http-equiv="refresh"' in folder.page.read_text()
    write(folder, events(9, 40))
    page.refresh(folder, True)
    assert state(folder) == "training"
    assert "my-run: full run, step 9 of 40" in folder.page.read_text()
    assert tile(folder, "time left") == "0:31"
    assert tile(folder, "loss") == "3.550"
    assert tile(folder, "learning rate") == "7.7e-05"
    assert tile(folder, "gradient norm") == "1"
    assert tile(folder, "tokens per second") == "100"
    assert tile(folder, "waiting for data") == "10.0%"
    assert tile(folder, "peak memory") == "3.0 GB"
    assert tile(folder, "sessions") == "1"
    write(folder, [Log(10.0, 20, 40, 2_000, loss=3.0)])
    page.refresh(folder, True)
    assert state(folder) == "evaluating"
    write(folder, [Log(10.0, 20, 40, 2_000, eval_loss=3.5)])
    page.refresh(folder, True)
    assert state(folder) == "saving"
    assert tile(folder, "validation loss") == "3.500"
    page.refresh(folder, False)
    assert state(folder) == "interrupted"
    assert 'http-equiv="refresh"' not in folder.page.read_text()

    again = LivePage("my-run", "full", SETTINGS, every=0)
    again.refresh(folder, True)
    assert state(folder) == "starting", "the events are those of the session before"
    write(folder, events(40, 40, begin=20))
    again.refresh(folder, True)
    assert state(folder) == "saving"
    assert tile(folder, "sessions") == "2"
    write(folder, [End(40, [5])])
    again.refresh(folder, False)
    assert state(folder) == "ended"
    assert "refresh" not in folder.page.read_text()


@pytest.mark.usefixtures("at_once")
def test_an_event_that_is_not_whole_is_read_the_next_time(folder: RunFolder) -> None:
    page = LivePage("my-run", "full", SETTINGS, every=0)
    first, second = "".join(map(as_line, events(5, 40))), as_line(Log(6.0, 6, 40, 600, loss=1.25))
    folder.progress.write_text(first + second[:30])
    page.refresh(folder, True)
    assert "step 5 of 40" in folder.page.read_text()
    folder.progress.write_text(first + second)
    page.refresh(folder, True)
    assert "step 6 of 40" in folder.page.read_text()
    assert tile(folder, "loss") == "1.250"


@pytest.mark.usefixtures("at_once")
def test_a_page_that_cannot_be_written_is_reported_once_and_ends_nothing(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.page.mkdir()
    page = LivePage("my-run", "full", SETTINGS, every=0)
    for _ in range(3):
        page.refresh(folder, True)
    page.refresh(folder, False)
    (said,) = caplog.messages
    assert "run.html cannot be written, the training goes on: IsADirectoryError" in said
    folder.page.rmdir()
    page.refresh(folder, False)
    assert state(folder) == "interrupted"


def test_it_is_written_only_as_often_as_it_is_cheap(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, events(5, 40))
    written = []

    def slow(*facts: object) -> str:
        written.append(facts)
        time.sleep(0.02)
        return "a page"

    monkeypatch.setattr(training_pages, "live_page", slow)
    page, begun = LivePage("my-run", "full", SETTINGS, every=0), time.monotonic()
    while time.monotonic() - begun < 1:
        page.refresh(folder, True)
    assert len(written) == 1, "20 ms are at most 1 % of two seconds"
    page.refresh(folder, False)
    assert len(written) == 2, "the end is shown at once"


def test_ten_thousand_steps_cost_less_than_a_hundredth_of_the_time(folder: RunFolder) -> None:
    write(folder, events(10_000, 10_000))
    page = LivePage("my-run", "full", SETTINGS)
    page.refresh(folder, True)  # reads all events once
    write(folder, [Log(9e5, 9_999, 10_000, 1, loss=1.0)])
    begun = time.process_time()
    page.refresh(folder, False)
    assert time.process_time() - begun < 0.1, "every ten seconds"
    assert folder.page.stat().st_size < 300_000


def test_it_has_no_figures_that_the_trainer_did_not_write(folder: RunFolder) -> None:
    """Events of the commit before have neither waited nor memory; a training without steps has no speed."""
    begin = Begin(0, 40, 0, 1, "NOT_DISTRIBUTED", "cpu")
    write(folder, [begin])
    LivePage("my-run", "full", SETTINGS).refresh(folder, True)
    assert "time left" not in folder.page.read_text()
    write(folder, [Log(1.0, 1, 40, 100, loss=math.nan)])
    LivePage("my-run", "full", SETTINGS).refresh(folder, False)
    page = folder.page.read_text()
    assert "waiting for data" not in page
    assert "Waiting for data" not in page
    assert "peak memory" not in page
    assert "not a number</span> train, in 1 step" in page


@pytest.mark.lengthy
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_loads_and_runs_nothing_while_it_runs(folder: RunFolder, tmp_path: Path, dark: bool) -> None:
    history = RunHistory()
    for event in events(37, 40):
        history.take(event)
    folder.page.write_text(page_of(HOSTILE, "full", history, "training", HOSTILE, 1))
    title = f"{HOSTILE}: full run, step 37 of 40"
    with Browser(tmp_path / "profile") as browser:
        for width in (1200, 400):
            browser.requests.clear()
            browser.open(folder.page, width=width, dark=dark)
            assert set(browser.requests) == {folder.page.as_uri()}
            assert browser.complaints == []
            assert browser.evaluate("document.title") == title
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelectorAll('svg').length") == 5
        history.take(Log(38.0, 38, 40, 3_800, loss=1.0))
        folder.page.write_text(page_of("r", "full", history, "ended", "", 1))
        give_up = time.monotonic() + 30
        while browser.evaluate("document.title") != "r: full run, step 38 of 40" and time.monotonic() < give_up:
            time.sleep(0.2)
        browser.requests.clear()
        time.sleep(2.5)
        assert browser.evaluate("document.title") == "r: full run, step 38 of 40"
        assert browser.requests == [], "an ended training's page does not load itself again"
