"""The data page, as a browser shows it."""

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import msgspec
import pytest
from PIL import Image

from browser import Browser
from drawn_pictures import drawn, encoded, put
from made_accounts import some_stats
from made_rows import fire_row, split_files, split_rules
from vlmflow.config.data_settings import NearDuplicates, PictureLimits
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.reports.counts_page import counts_page
from vlmflow.reports.data_page import data_page, thumbnail
from vlmflow.rows.near_duplicates import NearDuplicate
from vlmflow.rows.stats import Stats
from vlmflow.rows.validate import validate

LIMITS = PictureLimits()
HOSTILE = (
    "<script>document.title='taken'</script><img src=http://127.0.0.1:8/x onerror=document.title='taken'>\u202e&amp;"
)
"""As a turn's text; the row check refuses only those angle brackets that are the trainer's tags."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data set of 40 train and 6 test rows with pictures, and rejected ones of several kinds."""
    folder = tmp_path_factory.mktemp("page")
    train = [fire_row(f"gqa/{n}.jpg", f"question {n}", 1 + n % 3, source=f"s{n % 4}") for n in range(40)]
    train[3]["question"]["value"] = HOSTILE
    train[3]["source"] = "<b>'\"s"
    train += [
        fire_row("gqa/gone.jpg"),
        fire_row("gqa/0.jpg", conversations=[]),
        b'{"image": "<script>", NaN}',
        train[5],
    ]
    test = [fire_row(f"gqa/{n}.jpg", f"question {n}") for n in range(100, 106)]
    usable = {f"gqa/{n}.jpg": {"width": 64 + 8 * (n % 9), "height": 48} for n in (*range(40), *range(100, 106))}
    usable["gqa/0.jpg"]["first_frame"] = usable["gqa/1.jpg"]["first_frame"] = True
    gone = {"gqa/gone.jpg": {"reason": "missing", "detail": "no root holds <i>a file</i>", "name": None}}
    files = [
        split_files(folder, name, rows, pictures=usable | gone) for name, rows in (("train", train), ("test", test))
    ]
    data = folder / "data" / "fire"
    stats = validate(files, data, split_rules(0.1, 1, 0.5), 1)
    write_account(data / "stats.json", some_stats(**msgspec.structs.asdict(stats)))
    for path, entry in usable.items():
        put(folder / "store" / path, encoded(drawn(entry["width"], entry["height"]), "JPEG"))
    pairs = [
        NearDuplicate("picture", "gqa/1.jpg", "gqa/101.jpg", 3, 2, 1, "what is <b>this</b>"),
        NearDuplicate("question", "train-7", "test-9", 0, 1, 1, "who"),
    ]
    put(data / "near_duplicates.jsonl", msgspec.json.Encoder().encode_lines(pairs))
    return folder


def page_of(folder: Path) -> str:
    manifests = {name: folder / f"{name}.i" for name in ("train", "test")}
    return data_page(folder / "data" / "fire", manifests, folder / "store", LIMITS, NearDuplicates())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_without_asking_for_anything(
    folder: Path, browser: Browser, tmp_path: Path, dark: bool
) -> None:
    """Bars have sizes, pictures are decoded, nothing is loaded or run; screenshots remain in the test's folder."""
    page = tmp_path / "page.html"
    page.write_text(page_of(folder))
    browser.check_page(page, "fire: the data")
    browser.open(page, dark=dark)
    browser.screenshot(tmp_path / f"{'dark' if dark else 'light'}.png")
    pictures = browser.evaluate("[...document.images].map(i => i.naturalWidth)")
    assert len(pictures) == 14
    assert min(pictures) >= 48
    tall = "[...document.querySelectorAll('.bin i.some')].map(i => [i.offsetWidth, i.offsetHeight])"
    sizes = browser.evaluate(tall)
    assert len(sizes) > 10
    assert min(min(size) for size in sizes) > 0
    assert max(height for _, height in sizes) > 100
    for bars in ("#lost table:not(:has(.wide)) .bar i", ".bar i.train", ".track i"):
        widths = browser.evaluate(f"[...document.querySelectorAll('{bars}')].map(i => i.offsetWidth)")
        assert min(widths) > 0
        assert max(widths) > 60
    ink, paper = browser.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))"
    )
    assert (ink > paper + 300) if dark else (paper > ink + 300)


def test_the_browser_would_notice_a_request_and_a_script(browser: Browser, tmp_path: Path) -> None:
    """Check the browser test itself: the same hostile text, unescaped."""
    page = put(tmp_path / "bad.html", f"<!DOCTYPE html><title>own</title><body>{HOSTILE}".encode())
    browser.requests.clear()
    browser.open(page)
    assert browser.requests[1:] == ["http://127.0.0.1:8/x"]
    assert browser.evaluate("document.title") == "taken"


def test_hostile_texts_are_shown_as_texts(folder: Path, browser: Browser, tmp_path: Path) -> None:
    page = put(tmp_path / "page.html", page_of(folder).encode())
    browser.check_page(page, "fire: the data")
    assert browser.evaluate("document.querySelectorAll('main b img, main i b, main section i i').length") == 0
    text = browser.evaluate("document.body.innerText")
    assert HOSTILE in text
    assert "no root holds <i>a file</i>" in text
    assert "<b>'\"s" in text
    assert "what is <b>this</b>" in text


def test_the_page_says_how_much_bad_text_is_trained(folder: Path) -> None:
    """Rows of one to three attempts: the last one of each is scored 10, the others 2 and 3."""
    stats = read_account(folder / "data" / "fire" / "stats.json", Stats)
    bad, good = stats.trained_characters[2] + stats.trained_characters[3], stats.trained_characters[10]
    said = f"{bad / (bad + good):.0%} of the trained text is attempts scored below 8; "
    assert f"<p>{said}datasets.fire.min_score: 8 trains the others.</p>" in page_of(folder)
    manifests = {name: folder / f"{name}.i" for name in ("train", "test")}
    page = data_page(folder / "data" / "fire", manifests, folder / "store", LIMITS, NearDuplicates(), "my-good-run")
    assert f"<p>{said}run my-good-run trains the others.</p>" in page


def test_an_attempt_that_is_not_trained_is_called_so(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path / "page")
    train = tmp_path / "page" / "data" / "fire" / "train.jsonl"
    train.write_bytes(train.read_bytes().replace(b'Answer: a1"}', b'Answer: a1","loss":false}'))
    assert "<b>gpt, not trained</b>" in page_of(tmp_path / "page")
    assert "not trained" not in page_of(folder)


def test_tools_and_calls_of_a_row_are_shown(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path / "page")
    train = tmp_path / "page" / "data" / "fire" / "train.jsonl"
    lines = train.read_bytes().replace(b'"from":"gpt"', b'"from":"function_call"')
    train.write_bytes(lines.replace(b"]}\n", b'],"tools":"[see]"}\n'))
    page = page_of(tmp_path / "page")
    assert '<div class="turn" dir="auto"><b>tools</b>[see]' in page
    assert '<div class="turn gpt" dir="auto"><b>function_call</b>' in page


def test_every_count_of_the_account_is_on_the_page(folder: Path, browser: Browser, tmp_path: Path) -> None:
    page = put(tmp_path / "page.html", page_of(folder).encode())
    browser.open(page)
    tiles = browser.evaluate("[...document.querySelectorAll('.tile')].map(t => t.innerText.split('\\n'))")
    shown = {tile[0]: tile[1] for tile in tiles}
    frames = "document.querySelector('#pictures dl, section dl').innerText"
    assert "only the first of several frames, pages or sizes\n2 JPEG" in browser.evaluate(frames)
    stats = read_account(folder / "data" / "fire" / "stats.json", Stats)
    assert shown["raw rows in"] == "50"
    assert shown["rejected"] == str(sum(stats.train.rejected.values())) == "4"
    assert {name: shown[f"{name}.jsonl"] for name in stats.examples} == {
        name: str(count) for name, count in stats.examples.items()
    }
    reasons = browser.evaluate("[...document.querySelectorAll('.reason')].map(r => [r.id, r.innerText])")
    assert {name for name, _ in reasons} == {f"reason-{reason}" for reason in stats.train.rejected}
    rejected = {json.loads(line)["reason"]: json.loads(line) for line in quarantine(folder)}
    for name, said in reasons:
        row = rejected[name.removeprefix("reason-")]
        assert f"row {row['row']}, counted from 0" in said
        assert f"bytes {row['start']:,}–{row['end']:,}" in said
        assert row["file"] in said


def test_rows_left_out_are_counted_apart_from_rejected_ones(folder: Path, browser: Browser, tmp_path: Path) -> None:
    """In tiles, bars, tables and the other pages: rows in = kept + rejected + left out."""
    data = copytree(folder / "data" / "fire", tmp_path / "fire")
    stats = read_account(data / "stats.json", Stats)
    stats.train.rows_in += 30
    stats.train.rejected |= {"text_only": 10, "not_sampled": 20}
    write_account(data / "stats.json", stats)
    manifests = {name: folder / f"{name}.i" for name in ("train", "test")}
    html = data_page(data, manifests, folder / "store", LIMITS, NearDuplicates())
    browser.open(put(tmp_path / "page.html", html.encode()))
    tiles = browser.evaluate("[...document.querySelectorAll('.tile')].map(t => t.innerText.split('\\n'))")
    shown = {tile[0]: tile[1] for tile in tiles}
    assert [shown[name] for name in ("raw rows in", "kept", "rejected", "left out")] == ["80", "46", "4", "30"]
    assert "rows in = rows kept + rows rejected + rows left out" in html
    tables = browser.evaluate(
        "[...document.querySelectorAll('#lost h3 + .scroll')].map(t => [t.previousElementSibling.innerText, "
        "[...t.querySelectorAll('tbody th')].map(h => h.innerText)])"
    )
    reasons = dict(tables)
    assert set(reasons["Why rows were rejected"]) == {"bad_json", "duplicate", "picture_missing", "unbalanced_turns"}
    assert reasons["Why rows were left out"] == ["not_sampled", "text_only"]
    assert browser.evaluate("[...document.querySelectorAll('a')].every(a => document.querySelector(a.hash))")
    assert browser.evaluate("document.querySelectorAll('.reason').length") == 4
    parts = browser.evaluate("document.querySelector('.track + .key').innerText.split('\\n')")
    assert {"1 rejected as duplicates or leaks", "30 not requested, left out"} <= set(parts)
    split = "train: 74 rows in, 40 kept (54.1%), 4 rejected, 30 left out"
    assert split in browser.evaluate("document.querySelector('#lost h3').innerText")
    browser.open(put(tmp_path / "counts.html", counts_page(stats).encode()))
    assert browser.evaluate("document.querySelector('#lost h3').innerText") == split
    assert browser.evaluate("document.querySelector('#lost').innerText.includes('not_sampled')")
    assert browser.evaluate("[...document.querySelectorAll('.tile b')].map(b => b.innerText)")[:4] == [
        "80",
        "46",
        "4",
        "30",
    ]


@pytest.mark.parametrize("width", [1280, 400])
def test_every_reason_is_explained(folder: Path, browser: Browser, tmp_path: Path, width: int) -> None:
    """On a narrow page the table was wider than the window, and its last column invisible."""
    page = put(tmp_path / "page.html", page_of(folder).encode())
    browser.open(page, width=width)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('#lost tbody td.soft')].map(t => t.getBoundingClientRect())"
        ".map(b => [b.left, b.right, b.width])"
    )
    assert len(boxes) == 4
    assert all(left >= 0 and right <= width and wide > 250 for left, right, wide in boxes)


def test_hostile_values_of_an_account_are_texts(folder: Path, browser: Browser, tmp_path: Path) -> None:
    stats = read_account(folder / "data" / "fire" / "stats.json", Stats)
    stats.dataset = HOSTILE
    stats.unread["train"].unread_keys = {HOSTILE: 3}
    stats.unread["train"].ignored_keys = {"</td><b>": 1}
    page = put(tmp_path / "counts.html", counts_page(stats).encode())
    browser.check_page(page, f"{HOSTILE}: where every row went")
    text = browser.evaluate("document.body.innerText")
    assert text.count(HOSTILE) == 2
    assert "</td><b>, if it changes what the row means" in text


def test_empty_parts_are_left_out_or_named(folder: Path, browser: Browser, tmp_path: Path) -> None:
    """No table without rows, no list without items, no details without text."""
    data = copytree(folder / "data" / "fire", tmp_path / "fire")
    stats = read_account(data / "stats.json", Stats)
    for split, counts in stats.splits.items():
        counts.rows_in, counts.rejected = counts.kept, {}
        stats.pictures[split].unusable, stats.pictures[split].missing_by_source = {}, {}
    write_account(data / "stats.json", stats)
    for name in ("quarantine", "near_duplicates"):
        (data / f"{name}.jsonl").write_bytes(b"")
    manifests = {name: folder / f"{name}.i" for name in ("train", "test")}
    pages = {
        "data": data_page(data, manifests, folder / "store", LIMITS, NearDuplicates()),
        "counts": counts_page(stats),
    }
    for name, html in pages.items():
        browser.open(put(tmp_path / f"{name}.html", html.encode()))
        holds = "tbody, ul, dl, details > *, section, .track, .sheet, .charts, .shots"
        empty = f"[...document.querySelectorAll('{holds}')].filter(e => !e.innerText.trim() && !e.children.length)"
        assert browser.evaluate(f"{empty}.map(e => e.outerHTML)") == []
        assert "No row was rejected: every requested row is in the data." in html
    assert "There are none." in pages["data"]
    assert "not usable" not in pages["data"]
    assert "Unusable pictures" not in pages["counts"]


def quarantine(folder: Path) -> list[bytes]:
    return (folder / "data" / "fire" / "quarantine.jsonl").read_bytes().splitlines()


def test_the_same_data_give_the_same_page(folder: Path) -> None:
    assert page_of(folder) == page_of(folder)


def test_a_missing_or_changed_picture_is_left_blank(folder: Path, tmp_path: Path) -> None:
    """The store may have changed since validation: the page does not break, and shows no other file's bytes."""
    page = page_of(folder)
    kept = {path: path.read_bytes() for path in (folder / "store").rglob("*.jpg")}
    for number, path in enumerate(kept):
        path.unlink() if number % 2 else path.write_bytes(b"<html>")
    try:
        assert page.count("cannot be shown") == 0
        assert page_of(folder).count("cannot be shown") == 14
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_a_damaged_line_is_named(folder: Path) -> None:
    rows = folder / "data" / "fire" / "val.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-20])
    try:
        with pytest.raises(VlmflowError, match=rf"{rows}, line {len(whole.splitlines())}: "):
            page_of(folder)
    finally:
        rows.write_bytes(whole)


def test_pictures_on_the_page_contain_only_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret"
    file = put(tmp_path / "a.jpg", encoded(drawn(900, 300), "JPEG", exif=exif, comment=b"a secret"))
    url = thumbnail(file, 300, LIMITS)
    content = base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))
    assert b"secret" in file.read_bytes()
    assert b"secret" not in content
    assert Image.open(io.BytesIO(content)).size == (300, 100)


def test_a_picture_beyond_the_default_limits_is_shown_where_they_were_raised(tmp_path: Path) -> None:
    """A rewritten copy may be larger than any allowed file; it is shown too."""
    file = put(tmp_path / "a.jpg", encoded(Image.new("L", (8_000, 5_001)), "JPEG"))
    assert thumbnail(file, 300, LIMITS) is None
    assert thumbnail(file, 300, PictureLimits(max_pixels=50_000_000)) is not None
    noise = Image.frombytes("RGB", (64, 48), random.Random(0).randbytes(64 * 48 * 3))
    copy = put(tmp_path / "b.png", encoded(noise, "PNG"))
    tight = PictureLimits(max_pixels=64 * 48, max_bytes=5_000)
    assert copy.stat().st_size > tight.max_bytes
    assert thumbnail(copy, 300, tight) is not None


def test_near_duplicates_are_on_the_page_with_their_outcome(folder: Path) -> None:
    page = page_of(folder)
    assert "(perceptual hashes within 4 of 64 bits): 1. Train rows that name them: 2; of these, 1 ask" in page
    assert "ask what the test split asks. These rows stay (near_duplicates.drop is off)." in page
    asked = "Train rows without a picture that ask what a test row asks: 1. These rows "
    assert asked + "stay (near_duplicates.drop is off)." in page
    manifests = {name: folder / f"{name}.i" for name in ("train", "test")}
    dropped = data_page(folder / "data" / "fire", manifests, folder / "store", LIMITS, NearDuplicates(drop=True))
    assert "ask what the test split asks. These rows were rejected (near_duplicates.drop)." in dropped
    assert asked + "were rejected (near_duplicates.drop)." in dropped
