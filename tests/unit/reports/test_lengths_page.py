"""The lengths page, as a browser shows it."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from browser import Browser
from stages.lengths_page import main
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.lengths.count import LengthAccount, RowLength, max_lengths
from vlmflow.lengths.summary import ChatTemplate, LengthSummary, MaxLengths, MeasuredFiles, ShownText
from vlmflow.reports.planning_pages import lengths_page
from vlmflow.swift.model_layers import Description, Layout

HOSTILE = "<script>document.title='taken'</script>"


def row(folder: Path, split: str, name: str, text_tokens: int, picture_tokens: int = 0) -> RowLength:
    """Write a row, and return its length."""
    turns = [("system", "Be brief."), ("human", f"<image>\nWhat\n is {name}? " + "x" * 200), ("gpt", "a thing")]
    talk = [{"from": speaker, "value": value} for speaker, value in turns]
    whole = {"id": name, "source": "s<b>", "images": ["a.jpg"], "attempts": [1], "scores": [], "conversations": talk}
    line = json.dumps(whole).encode()
    with (folder / f"rows-{split}.jsonl").open("ab") as file:
        start = file.tell()
        file.write(line + b"\n")
    return RowLength(name, start, start + len(line), text_tokens, picture_tokens, trained_tokens=30)


@pytest.fixture
def lengths(tmp_path: Path) -> dict[str, Path]:
    """Lengths of 200 train rows, half of them with a picture, and of 20 val rows without.

    With the rows (rows-SPLIT.jsonl) and summary.json.
    """
    rows = {
        "train": [row(tmp_path, "train", f"t{n}", 100 + n, 50 * (n % 2)) for n in range(200)],
        "val": [row(tmp_path, "val", HOSTILE if n == 19 else f"v{n}", 90 + n) for n in range(20)],
    }
    files = {split: tmp_path / f"{split}.jsonl" for split in rows}
    accounts = {split: LengthAccount.of(each) for split, each in rows.items()}
    for split, each in rows.items():
        files[split].write_bytes(msgspec.json.Encoder().encode_lines(each))
    described = {split: account.describe() for split, account in accounts.items()}
    digests = MeasuredFiles(rows={}, lengths={}, model={})
    covered = max_lengths(accounts.values())
    write_account(
        tmp_path / "summary.json",
        LengthSummary(
            **described,
            max_length=covered,
            image_max_tokens=64,
            text_args={},
            compared_with_ms_swift=28,
            digests=digests,
        ),
    )
    return files


def page_of(lengths: dict[str, Path], max_length: int = 300) -> str:
    rows = {split: file.with_name(f"rows-{split}.jsonl") for split, file in lengths.items()}
    return lengths_page("my-run", lengths, rows, lengths["train"].with_name("summary.json"), max_length)


def test_it_tells_whether_servers_give_the_model_what_it_is_trained_on(lengths: dict[str, Path]) -> None:
    summary = lengths["train"].with_name("summary.json")
    account = read_account(summary, LengthSummary)
    assert "chat template" not in page_of(lengths)
    write_account(summary, msgspec.structs.replace(account, chat_template=ChatTemplate(28, None)))
    assert "The model&#39;s own chat template gives them the tokens of the training." in page_of(lengths)
    write_account(summary, msgspec.structs.replace(account, chat_template=ChatTemplate(28, "row r: <b>")))
    assert "differs from the training (accepted by template_differs): row r: &lt;b&gt;." in page_of(lengths)


def test_it_shows_a_row_as_the_model_reads_it(lengths: dict[str, Path]) -> None:
    summary = lengths["train"].with_name("summary.json")
    assert "As the model reads it" not in page_of(lengths)
    example = [ShownText("<|user|>", added=True), ShownText("Why?"), ShownText("So.", trained=True)]
    write_account(summary, msgspec.structs.replace(read_account(summary, LengthSummary), example=example))
    page = page_of(lengths)
    assert (
        '<span class="soft ">&lt;|user|&gt;</span><span class=" ">Why?</span><span class=" trained">So.</span>' in page
    )


def test_it_says_what_the_model_is(lengths: dict[str, Path]) -> None:
    summary = lengths["train"].with_name("summary.json")
    layouts = [Layout("a.*.w", "b.*.w", 12, ["Transpose"]), Layout("c", "c", 1)]
    model = Description(
        "SomeModel", {"language_model": 1234}, layouts, ["input_ids"], {"head": "c"}, 4, ["<s>"], "Pixels"
    )
    write_account(summary, msgspec.structs.replace(read_account(summary, LengthSummary), model=model))
    page = page_of(lengths)
    assert "<td>1,234 weights</td>" in page
    assert '<code>a.*.w</code></th><td class="n">12</td><td><code>b.*.w</code></td><td>Transpose</td>' in page
    assert "<td>4 in a layer</td>" in page
    assert "<code>&lt;s&gt;</code>" in page


def test_it_recommends_a_max_length(lengths: dict[str, Path]) -> None:
    page = page_of(lengths)
    assert "25 of 220 rows are longer" in page  # those with a picture, from 251 text tokens
    assert "0 of 220 rows are longer" in page_of(lengths, max_length=349)
    assert "longer rows need over_long" not in page, "there are none"
    summary = lengths["train"].with_name("summary.json")
    account = read_account(summary, LengthSummary)
    most = MaxLengths(account.max_length.covers_most, 4_096)
    write_account(summary, msgspec.structs.replace(account, max_length=most))
    assert "recommended max_length; longer rows need over_long: leave_out or shorten" in page_of(lengths)
    assert ">384<" in page  # 349 tokens, in steps of 64
    assert "28 rows compared with ms-swift" in page
    assert ">6,000<" in page, "trained tokens of 200 rows"


def test_text_and_pictures_are_drawn_separately(lengths: dict[str, Path]) -> None:
    page = page_of(lengths)
    for title in ("Tokens of a row", "Text of a row", "Pictures of a row"):
        assert f"<h3>{title}</h3>" in page
    assert 'title="train, 50–70: 100 (100.0%)"' in page
    lines = lengths["train"].read_text().replace('"picture_tokens":50', '"picture_tokens":0')
    lengths["train"].write_text(lines)
    assert "Pictures of a row" not in page_of(lengths), "rows without pictures have no chart of them"


def test_the_longest_rows_are_named_with_a_look_at_each(lengths: dict[str, Path]) -> None:
    page = page_of(lengths, max_length=348)
    assert page.index("<code>t199</code>") < page.index("<code>t197</code>") < page.index("<code>v18</code>")
    assert re.search(r'<code>t197</code>\s*<div class="look" dir="auto">What is t197\? x{140,} …</div>', page)
    assert page.count("2 turns · s&lt;b&gt;") == 40
    assert page.count("longer than max_length") == 1
    assert HOSTILE not in page


def test_a_browser_loads_and_runs_nothing(lengths: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(lengths))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(file, "my-run: the lengths of its rows")
        browser.screenshot(tmp_path / "page.png")
        text = browser.evaluate("document.body.innerText")
    assert text.count(HOSTILE) == 2, "as the row's id and in its question"


def test_a_place_without_a_row_is_named(lengths: dict[str, Path]) -> None:
    rows = lengths["train"].with_name("rows-train.jsonl")
    rows.write_bytes(b" " + rows.read_bytes())
    with pytest.raises(VlmflowError, match=r"rows-train\.jsonl, bytes [\d,]+ to [\d,]+: "):
        page_of(lengths)


@pytest.mark.parametrize("changed", ["train.jsonl", "rows/val.jsonl"])
def test_other_lengths_or_rows_than_those_measured_are_refused(
    lengths: dict[str, Path], tmp_path: Path, changed: str
) -> None:
    (tmp_path / "rows").mkdir()
    rows = {
        split: file.with_name(f"rows-{split}.jsonl").rename(tmp_path / "rows" / file.name)
        for split, file in lengths.items()
    }
    summary = tmp_path / "summary.json"
    ours, theirs = ({file.name: sha256_of(file) for file in files.values()} for files in (lengths, rows))
    digests = MeasuredFiles(rows=theirs, lengths=ours, model={})
    write_account(summary, msgspec.structs.replace(read_account(summary, LengthSummary), digests=digests))
    files = {**lengths, **{f"{split}_rows": file for split, file in rows.items()}}
    main(**files, summary=summary, page=tmp_path / "page.html", max_length=300)
    assert "<code>t199</code>" in (tmp_path / "page.html").read_text()
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    with pytest.raises(VlmflowError, match=rf"{changed}: .*summary\.json records other digests"):
        main(**files, summary=summary, page=tmp_path / "page.html", max_length=300)


def test_a_damaged_line_is_named(lengths: dict[str, Path]) -> None:
    lengths["val"].write_text('{"text_tokens": 1}\n')
    with pytest.raises(VlmflowError, match=r"val\.jsonl, line 1: "):
        page_of(lengths)
