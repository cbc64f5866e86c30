"""The evaluation page, as a browser shows it."""

import json
from pathlib import Path

import msgspec
import pytest

from browser import Browser
from made_accounts import some_answers, some_evaluation, some_figures
from vlmflow.config.row_settings import PictureLimits
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import EvaluatedRow, Interval, Loss
from vlmflow.evaluation.answering.accounts import AnsweredRow, AnsweredTurn, ModelAnswer
from vlmflow.reports.eval_page import eval_page

LONG = "lp" * 50
HOSTILE = "<script>document.title='taken'</script>"


def evaluated_row(number: int, tuned: float) -> EvaluatedRow:
    base = {name: Loss(10.0, 5) for name in ("history", "question", "placebo", "first")}
    return EvaluatedRow(
        f"r{number}", "s<b>", [], f"g{number}", f"r{(number + 1) % 4}", base, base | {"history": Loss(tuned, 5)}
    )


def write_rows(file: Path, count: int = 4) -> None:
    turns = [("human", f"What is it? {HOSTILE}"), ("gpt", "red"), ("human", "Not red: look."), ("gpt", "green")]
    talk = [{"from": speaker, "value": value} for speaker, value in turns]
    file.write_text(
        "".join(json.dumps({"id": f"r{n}", "source": "s", "conversations": talk}) + "\n" for n in range(count))
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation of four rows, of which two gain, one loses and one stays; and the data set's file beside it."""
    folder = tmp_path / "eval" / "mine" / "val"
    folder.mkdir(parents=True)
    rows = [evaluated_row(number, tuned) for number, tuned in enumerate([5.0, 20.0, 10.0, 9.0])]
    (folder / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    few = Interval(0.5, None, None)
    sources = {"gqa": some_figures(), "s<b>": some_figures(learned=few)}
    write_account(folder / "report.json", some_evaluation(sources=sources, left_out={"no_donor": 1_234}))
    write_rows(tmp_path / "val.jsonl")
    return folder


def html(folder: Path) -> str:
    rows = {"val": folder.parents[2] / "val.jsonl"}
    answers = {"val": place} if (place := folder.parents[2] / "answers").exists() else {}
    return eval_page([folder], rows, answers, folder / "no pictures", PictureLimits(), has_pictures=False)


def test_it_shows_verdict_figures_and_rows_and_runs_nothing(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(html(folder))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(page, "mine: is it better?")
        text = browser.evaluate("document.body.innerText")
        for said in (
            "learned",
            "1,234 no donor",
            "1,234 row(s) without another row's feedback as a control (a row of the same source",
            "Another row's feedback is a placebo",
            "-0.500 (-0.600 to -0.400)",
            "What the training changed",
            "-1.000 nats",
        ):
            assert said in text
        shown = browser.evaluate("[...document.querySelectorAll('.sample code')].map(e => e.textContent).join()")
        assert shown == "r0,r3,r1"
        bands = "[...document.querySelectorAll('.range')].map(e => e.querySelectorAll('.band').length).join('')"
        assert browser.evaluate(bands) == "111" + "111" + "10"
        inside = """[...document.querySelectorAll('.range i')].every(mark => {
            const own = mark.getBoundingClientRect(), bar = mark.parentNode.getBoundingClientRect();
            return own.left >= bar.left - 4 && own.right <= bar.right + 4; })"""
        assert browser.evaluate(inside) is True


def an_answer(text: str, right: bool) -> ModelAnswer:
    return ModelAnswer(text, text, False, right, right, float(right), float(right), right)


def test_answers_are_shown_side_by_side(folder: Path, tmp_path: Path) -> None:
    turns = [
        AnsweredTurn(
            rounds, "q", "r", "green", "text", an_answer(f"blue {HOSTILE}{LONG}", False), an_answer("green", rounds > 0)
        )
        for rounds in (0, 1)
    ]
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "rows.jsonl").write_bytes(msgspec.json.encode(AnsweredRow("r0", "s", [], "g", False, turns)) + b"\n")
    write_account(answers / "report.json", some_answers())
    page = tmp_path / "page.html"
    page.write_text(html(folder))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(page, "mine: is it better?")
        inside = """[...document.querySelectorAll('.answers td')].every(cell =>
            cell.getBoundingClientRect().right <= cell.closest('.sample').getBoundingClientRect().right)"""
        assert browser.evaluate(inside) is True
        shown = (
            "[...document.querySelectorAll('.answers tbody tr')].map(e => e.innerText.replace(/\\s+/g, ' ')).join('|')"
        )
        wrong = f"wrong blue {HOSTILE}{LONG}"
        expected = f"at first {wrong} wrong green|after feedback 1 {wrong} right green"
        assert browser.evaluate(shown) == expected
        text = browser.evaluate("document.body.innerText")
    assert "40.0%" in text
    assert "6 of 9" in text
    assert "relaxed accuracy" in text
    assert "Rows with most gain, of those that both models were asked about" in text
    assert text.count("at first") == 1, "rows that were not asked are not shown"
    assert "Rows with most loss" not in text
    assert "In 25.0% of the rows the feedback holds the right answer. Picture limits: 4 to 64 tokens." in " ".join(
        text.split()
    )


def test_without_feedback_no_page_speaks_of_it(folder: Path, tmp_path: Path) -> None:
    """And each question has its own right answer."""
    loss, change = {"answer": Loss(10.0, 5)}, Interval(-0.1, -0.2, -0.05)
    rows = [EvaluatedRow("r0", "s", [], "g0", None, loss, {"answer": Loss(5.0, 5)})]
    (folder / "rows.jsonl").write_bytes(msgspec.json.encode(rows[0]) + b"\n")
    figures = some_figures(
        base={"answer": 2.0},
        tuned={"answer": 1.0},
        difference={"answer": change},
        **dict.fromkeys(("base_uses", "tuned_uses", "learned")),
    )
    plain = {"feedback": False, "all": figures, "sources": {"s": figures}, "left_out": {}, "sentence": "Better."}
    write_account(folder / "report.json", some_evaluation(split="test", looks=3, **plain))
    answer = an_answer("blue", False)
    turns = [AnsweredTurn(k, "q", "r", gold, "text", answer, answer) for k, gold in enumerate(["green", "grey"])]
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "rows.jsonl").write_bytes(msgspec.json.encode(AnsweredRow("r0", "s", [], "g", None, turns)) + b"\n")
    asked = msgspec.structs.replace(some_answers(), feedback=False, holds_gold=None, looks=5)
    write_account(answers / "report.json", asked)
    made = html(folder)
    for word in ("placebo", "own feedback", "after feedback", "corrected", "donor"):
        assert word not in made
    shown = " ".join(made.split())
    for said in ("after k earlier questions", "question 2", ">green<", ">grey<", ">5<"):
        assert said in shown


def test_the_same_evaluation_gives_the_same_page(folder: Path) -> None:
    assert html(folder) == html(folder)


def test_a_row_that_the_data_set_no_longer_has_is_an_error(folder: Path) -> None:
    write_rows(folder.parents[2] / "val.jsonl", 1)
    with pytest.raises(VlmflowError, match="it has no row r1, which was evaluated"):
        html(folder)
