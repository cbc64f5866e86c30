"""The evaluation page, as a browser shows it."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from browser import Browser
from made_accounts import an_answer, answers_alone, compared, some_answers, some_evaluation, some_figures
from made_rows import write_picture
from vlmflow.config.settings import PictureLimits
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import (
    AnsweredRow,
    AnsweredTurn,
    Condition,
    EvaluatedRow,
    Loss,
    Margin,
    MarginReport,
)
from vlmflow.reports.eval_page import eval_page

LONG = "lp" * 50
HOSTILE = "<script>document.title='taken'</script>"


def margins(gain: float) -> dict[str, Margin]:
    """Return those of a model whose margin is larger by `gain` with its own feedback than with another row's."""
    values = {"question": -0.25, "own": 0.5 + gain, "other": 0.5, "other_picture": 0.125}
    return {context: Margin(Loss(4 * (3 - value), 4), Loss(6.0, 2)) for context, value in values.items()}


def evaluated_row(number: int, base: float, tuned: float) -> EvaluatedRow:
    return EvaluatedRow(
        id=f"r{number}",
        source="s<b>",
        images=[],
        group=f"g{number}",
        right=f"green {HOSTILE}",
        wrong=f"red {LONG}",
        donors=[f"r{(number + 1) % 4}", f"r{(number + 2) % 4}"],
        picture_donor=None,
        gold_in_feedback=False,
        base=margins(base),
        tuned=margins(tuned),
    )


def write_rows(file: Path, count: int = 4, scores: tuple[int, ...] = (2, 9, 1)) -> None:
    said = [f"What is it? {HOSTILE}", "red", "Not red: look.", "Thought: I see.\nAnswer: green", "No, red.", "red"]
    talk = [{"from": "gpt" if n % 2 else "human", "value": text} for n, text in enumerate(said)]
    row = {"source": "s", "images": [], "attempts": [1, 2, 3], "scores": scores, "conversations": talk}
    file.write_text("".join(json.dumps({"id": f"r{n}"} | row) + "\n" for n in range(count)))


GAINS = [(-1.0, 2.0), (1.0, -1.0), (1.0, 3.0), (-0.5, 0.5)]
"""What base and tuned model gain from the own feedback in each row: two rows get better, one worse, one in degree."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation of four rows, and the data set's file beside it; its figures are those of more rows."""
    folder = tmp_path / "eval" / "mine" / "val"
    folder.mkdir(parents=True)
    rows = [evaluated_row(number, base, tuned) for number, (base, tuned) in enumerate(GAINS)]
    (folder / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    few = some_figures(rows=9, uses_feedback=compared(0.4, 0.9, None))
    figures = MarginReport(some_figures(), some_figures(rows=365, sees=None), {"gqa": some_figures(), "s<b>": few})
    of_four = {"rows": 4, "left_out": {"no_donor": 1_234}, "conditions": {"adds": Condition("refuted", "open")}}
    write_account(folder / "report.json", some_evaluation(**of_four, figures=figures))
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
            "1,234 rows without another row's feedback as a control (a row of the same source",
            "Three controls tell",
            "it helps more than neutral feedback, and more often than in the base\nrefuted\nopen",
            "tuned minus base: +25.0 points (+21.0 to +29.0)",
            "the models differ in 90 of 400 rows",
            "75.0% (71.0 to 79.0)",
            "Without 35 rows whose feedback contains the gold answer",
            "-1.000 (-1.040 to -0.960)",
            "+50.0 points (no interval)",
            "2 rows in which the tuned model uses feedback and its base does not",
            "1 row in which the base uses feedback and the tuned model does not",
        ):
            assert said in text
        shown = browser.evaluate("[...document.querySelectorAll('.sample code')].map(e => e.textContent).join()")
        assert shown == "r0,r3,r1"
        bands = "[...document.querySelectorAll('.range')].map(e => e.querySelectorAll('.band').length).join('')"
        # Base and tuned of each share, and the losses; without the gold answer one share less; and two sources.
        assert browser.evaluate(bands) == "11" * 4 + "1111" + "11" * 3 + "1111" + "11" + "00"
        inside = """[...document.querySelectorAll('.range i')].every(mark => {
            const own = mark.getBoundingClientRect(), bar = mark.parentNode.getBoundingClientRect();
            return own.left >= bar.left - 4 && own.right <= bar.right + 4; })"""
        assert browser.evaluate(inside) is True
        half = """[...document.querySelectorAll('.both .range')].every(bar => {
            const mark = bar.querySelector('.mark').getBoundingClientRect(), own = bar.getBoundingClientRect();
            return Math.abs(mark.left - (own.left + own.width / 2)) < 1; })"""
        assert browser.evaluate(half) is True


def test_a_report_of_an_earlier_version_is_read(folder: Path) -> None:
    """It has one donor a row, one control, and no conditions."""
    report = json.loads((folder / "report.json").read_text())
    del report["conditions"], report["figures"]["with_gold"]
    del report["figures"]["with_echo"], report["figures"]["without_echo"]
    for figures in (
        report["figures"]["all"],
        report["figures"]["without_gold"],
        *report["figures"]["sources"].values(),
    ):
        for name in ("adds", "helps", "own", "one_answer"):
            del figures[name]
    (folder / "report.json").write_text(json.dumps(report))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["donor"] = row.pop("donors")[0]
        del row["echo"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = html(folder)
    assert "Without 35 rows whose feedback contains the gold answer" in made
    assert "learned only if" not in made


def test_right_and_wrong_answer_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    """Before them the row's turns up to the right answer; below, both models' margins, and the other row's feedback."""
    page = tmp_path / "page.html"
    page.write_text(html(folder))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(page, "mine: is it better?")
        sides = """[...document.querySelector('.sides').children].map(e => {
            const place = e.getBoundingClientRect(); return [e.innerText, place.top, place.left, place.right]; })"""
        right, wrong = browser.evaluate(sides)
        shown = "[...document.querySelectorAll('.sample .turn')].slice(0, 5).map(e => e.textContent)"
        turns = [" ".join(turn.split()) for turn in browser.evaluate(shown)]
        row = "[...document.querySelector('.margins').rows].map(e => e.innerText.replace(/\\s+/g, ' ')).join('|')"
        margins_shown = browser.evaluate(row)
        other = browser.evaluate("document.querySelector('.sample details').textContent")
        inside = """[...document.querySelectorAll('.margins td')].every(cell =>
            cell.getBoundingClientRect().right <= cell.closest('.sample').getBoundingClientRect().right)"""
        assert browser.evaluate(inside) is True
    assert (right[0], wrong[0]) == (f"right answer\ngreen {HOSTILE}", f"wrong answer\nred {LONG}")
    assert right[1] == wrong[1]
    assert right[3] <= wrong[2]
    assert turns[:3] == [f"humanWhat is it? {HOSTILE}", "gptred", "humanNot red: look."]
    assert turns[3].startswith("right answer")
    assert margins_shown == (
        "right over wrong, nats per token base tuned|to the question alone -0.250 -0.250|with its own feedback -0.500 "
        "+2.500|with another row's feedback +0.500 +0.500|with another row's picture +0.125 +0.125"
    )
    assert " ".join(other.split()) == "the other rows' feedbackhumanNot red: look. humanNot red: look."


def test_the_other_rows_picture_is_shown(folder: Path, tmp_path: Path) -> None:
    for name, colour in (("own.png", (200, 0, 0)), ("other.png", (0, 0, 200))):
        write_picture(tmp_path / "pictures" / name, colour)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row | {"images": ["other.png"]}) + "\n" for row in rows))
    row = msgspec.structs.replace(evaluated_row(0, -1.0, 2.0), images=["own.png"], picture_donor="r2")
    (folder / "rows.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    write_account(folder / "report.json", some_evaluation(rows=1))
    made = eval_page([folder], {"val": tmp_path / "val.jsonl"}, {}, tmp_path / "pictures", PictureLimits(), True)
    own, below = made.split("the other row&#39;s picture")
    for part, name in ((own, "own.png"), (below, "other.png")):
        assert re.findall(r'<img src="data:image/jpeg;base64,[^"]+" alt="([^"]+)"', part) == [name]


def test_a_run_that_costs_first_answers_is_not_green(folder: Path) -> None:
    assert '<p class="verdict good"><b>learned</b>' in html(folder)
    write_account(folder / "report.json", some_evaluation(rows=4, costs_first_answers=True))
    assert '<p class="verdict maybe"><b>learned; costs first answers</b>' in html(folder)


def test_answers_are_shown_side_by_side(folder: Path, tmp_path: Path) -> None:
    blue = an_answer(f"blue {HOSTILE}{LONG}", right=False)
    turns = [
        AnsweredTurn(rounds, "q", "r", "green", "text", blue, an_answer("green", right=rounds > 0)) for rounds in (0, 1)
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
    assert "and its base does not, of those that both models were asked about; here" in text
    assert text.count("at first") == 1, "rows that were not asked are not shown"
    assert "Rows that got worse" not in text
    assert "In 25.0% of the rows the feedback holds the right answer. Picture limits: 4 to 64 tokens." in " ".join(
        text.split()
    )


def test_without_feedback_no_page_speaks_of_it(folder: Path, tmp_path: Path) -> None:
    """And each question has its own right answer."""

    def answers_lose(nats: float) -> dict[str, Margin]:
        return {"question": Margin(Loss(nats, 5), None)}

    row = msgspec.structs.replace(
        evaluated_row(0, 0, 0), right=None, wrong=None, donors=[], base=answers_lose(10), tuned=answers_lose(5)
    )
    (folder / "rows.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    figures = MarginReport(answers_alone(), None, {name: answers_alone() for name in ("s", "t")})
    plain = {"rows": 1, "feedback": False, "figures": figures, "left_out": {}, "sentence": "Better."}
    write_account(folder / "report.json", some_evaluation(split="test", looks=3, **plain))
    answer = an_answer("blue", right=False)
    turns = [AnsweredTurn(k, "q", "r", gold, "text", answer, answer) for k, gold in enumerate(["green", "grey"])]
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "rows.jsonl").write_bytes(msgspec.json.encode(AnsweredRow("r0", "s", [], "g", None, turns)) + b"\n")
    asked = msgspec.structs.replace(some_answers(), feedback=False, holds_gold=None, looks=5)
    write_account(answers / "report.json", asked)
    made = html(folder)
    for word in ("feedback", "corrected", "donor", "wrong one", "right answer,"):
        assert word not in made
    shown = " ".join(made.split())
    for said in (
        "after k earlier questions",
        "question 2",
        ">green<",
        ">grey<",
        ">5<",
        "loss of the answers, after the row&#39;s own turns",
        "-0.100 (-0.140 to -0.060)",
        "1 row in which the tuned model predicts the answers better than its base, of those",
        "+1.000 nats per token",
        "Answer: green",
    ):
        assert said in shown, said


def test_the_same_evaluation_gives_the_same_page(folder: Path) -> None:
    assert html(folder) == html(folder)


def test_a_row_that_the_data_set_no_longer_has_is_an_error(folder: Path) -> None:
    write_rows(folder.parents[2] / "val.jsonl", 1)
    with pytest.raises(VlmflowError, match="it has no row r1 as it was evaluated"):
        html(folder)


def test_rows_whose_scores_changed_are_not_shown_as_evaluated(folder: Path) -> None:
    write_rows(folder.parents[2] / "val.jsonl", scores=(2, 7, 1))
    with pytest.raises(VlmflowError, match="it has no row r0 as it was evaluated"):
        html(folder)


def test_rows_of_another_evaluation_are_refused(folder: Path) -> None:
    """The page would show few of them, or none, without a word."""
    lines = (folder / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rows.jsonl").write_bytes(lines[0])
    with pytest.raises(VlmflowError, match=r"rows\.jsonl has 1 rows, and report\.json is of 4"):
        html(folder)
    (folder / "rows.jsonl").write_bytes(re.sub(rb'"tokens":\d+', b'"tokens":0', b"".join(lines)))
    with pytest.raises(VlmflowError, match=r"rows\.jsonl.*>= 1"):
        html(folder)
