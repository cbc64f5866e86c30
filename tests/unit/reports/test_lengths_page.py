"""The lengths page, as a browser shows it."""

import json
from pathlib import Path

import pytest

from browser import Browser
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import write_json
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.token_counts import LengthAccount, max_lengths
from vlmflow.reports.lengths_page import lengths_page

HOSTILE = "<script>document.title='taken'</script>"


@pytest.fixture
def lengths(tmp_path: Path) -> dict[str, Path]:
    """Lengths of 200 train rows, half of them with a picture, and of 20 val rows without; beside them summary.json."""
    rows = {
        "train": [RowLength(f"t{n}", 0, 0, 100 + n, 50 * (n % 2)) for n in range(200)],
        "val": [RowLength(HOSTILE if n == 19 else f"v{n}", 0, 0, 90 + n) for n in range(20)],
    }
    files = {split: tmp_path / f"{split}.jsonl" for split in rows}
    accounts = {split: LengthAccount.of(each) for split, each in rows.items()}
    for split, each in rows.items():
        lines = ({field: getattr(row, field) for field in row.__struct_fields__} for row in each)
        files[split].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    described = {split: account.describe() for split, account in accounts.items()}
    more = {"max_length": max_lengths(accounts.values()), "image_max_tokens": 64, "compared_with_ms_swift": 28}
    write_json(tmp_path / "summary.json", described | more)
    return files


def page_of(lengths: dict[str, Path], max_length: int = 300) -> str:
    return lengths_page("my-run", lengths, lengths["train"].with_name("summary.json"), max_length)


def test_it_says_which_max_length_the_rows_need(lengths: dict[str, Path]) -> None:
    page = page_of(lengths)
    assert "25 of 220 rows are longer" in page  # those with a picture from 251 text tokens on
    assert "0 of 220 rows are longer" in page_of(lengths, max_length=349)
    assert "longer rows need over_long" not in page, "there are none"
    summary = lengths["train"].with_name("summary.json")
    account = json.loads(summary.read_text())
    account["max_length"]["covers_all"] = 4_096
    write_json(summary, account)
    assert "recommended max_length; longer rows need over_long: leave_out or shorten" in page_of(lengths)
    assert ">384<" in page  # 349 tokens, in steps of 64
    assert "28 rows compared with ms-swift" in page


def test_text_and_pictures_are_drawn_apart(lengths: dict[str, Path]) -> None:
    page = page_of(lengths)
    for title in ("Tokens of a row", "Text of a row", "Pictures of a row"):
        assert f"<h3>{title}</h3>" in page
    assert 'title="train, 50–70: 100 (100.0%)"' in page
    lines = lengths["train"].read_text().replace('"picture_tokens": 50', '"picture_tokens": 0')
    lengths["train"].write_text(lines)
    assert "Pictures of a row" not in page_of(lengths), "rows without pictures have no chart of them"


def test_the_longest_rows_are_named(lengths: dict[str, Path]) -> None:
    page = page_of(lengths)
    assert page.index("<code>t199</code>") < page.index("<code>t197</code>") < page.index("<code>v18</code>")
    assert HOSTILE not in page


def test_a_browser_loads_and_runs_nothing(lengths: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(lengths))
    with Browser(tmp_path / "profile") as browser:
        browser.open(file)
        browser.screenshot(tmp_path / "page.png")
        assert browser.evaluate("document.title") == "my-run: the lengths of its rows"
        assert browser.evaluate("document.scripts.length") == 0
        assert browser.requests == [file.as_uri()]
        assert browser.complaints == []


def test_a_damaged_line_is_named(lengths: dict[str, Path]) -> None:
    lengths["val"].write_text('{"text_tokens": 1}\n')
    with pytest.raises(VlmflowError, match=r"val\.jsonl, line 1: "):
        page_of(lengths)
