"""Compare two output folders byte for byte, except for what always differs between runs."""

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

SKIPPED = {".snakemake", "logs", "benchmarks", "sample", "tiny-model", "stores"}
"""Snakemake's own records, times, the demo's inputs, and folders that no target names."""

DIFFERENT = re.compile(
    r"""(?x) (.*\.)?
    ( git_commit
    | seconds | tokens_per_second
    | readable  # the estimated time in a sentence, whose other figures have keys of their own
    | progress  # the digest of the trainer's events, which have times
    | peak_memory\.\d+  # bytes of a whole process, which differ from call to call
    | pace\.\w+  # seconds per step, token and evaluation
    | adapter_config(\.json)?  # the digest of a file whose target_modules peft writes in any order; see _content
    )"""
)
"""The keys whose values differ between two runs of the same work."""

TIMES = re.compile(r"progress\.jsonl|run-.*\.html")
"""The trainer's events, which have times, and a run's page, which draws these and the accounts compared here."""

FIGURES = {
    "gate.html": re.compile(
        r"(?<= tokens, )[\d:]+|(?<=tokens per second</span>\n<b>)[\d,.]+|(?<=peak memory</span>\n<b>)[\d,]+ MB"
    ),
    "README.md": re.compile(r"(?<= tokens in )[\d,.]+ s\b"),
}
"""Times, speeds and peak memory in pages, by the page's name: the estimate and two tiles of the gate's page, and in the
model card the seconds of the training. All other pages are the same bytes."""


def differences(one: Path, other: Path) -> Iterator[str]:
    """Return a line for each difference between two folders of outputs.

    The line has the file; for JSON the key and both values, for a page the number and the texts of the first line that
    differs. JSON files are compared value by value without the keys of DIFFERENT, pages without their FIGURES, all
    others byte by byte.
    """
    for name in sorted({*_files_of(one), *_files_of(other)}):
        here, there = one / name, other / name
        if not here.is_file() or not there.is_file():
            yield f"{name}: only in {one if here.is_file() else other}"
        elif here.read_bytes() != there.read_bytes():
            yield from _of_file(name, here, there)


def _of_file(name: str, here: Path, there: Path) -> Iterator[str]:
    if here.suffix == ".json":
        one, other = (dict(_leaves(_content(file))) for file in (here, there))
        for key in sorted({*one, *other}):
            values = one.get(key, "nothing"), other.get(key, "nothing")
            if values[0] != values[1] and not DIFFERENT.fullmatch(key):
                yield f"{name} {key}: {values[0]!r:.80} and {values[1]!r:.80}"
    elif here.suffix in (".html", ".md"):
        pairs = zip_longest(_lines(here), _lines(there), fillvalue="nothing")
        different = ((number, *pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
        for number, text, instead in list(different)[:1]:
            yield f"{name}, line {number}: {text!r:.80} and {instead!r:.80}"
    else:
        yield f"{name}: {here.stat().st_size:,} and {there.stat().st_size:,} bytes"


def _lines(page: Path) -> list[str]:
    """Return the lines of a page without its FIGURES, with their ends."""
    text = page.read_bytes().decode()
    return (FIGURES[page.name].sub("#", text) if page.name in FIGURES else text).splitlines(keepends=True)


def _content(file: Path) -> Any:
    """Return a JSON document, of peft's with the names in `target_modules` sorted.

    peft makes this pattern or list from a set, whose order changes from process to process.
    """
    content = json.loads(file.read_bytes())
    if file.name == "adapter_config.json":
        content["target_modules"] = sorted(re.findall(r"\w+", str(content["target_modules"])))
    return content


def _files_of(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [name.as_posix() for name in names if name.parts[0] not in SKIPPED and not TIMES.fullmatch(name.name)]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values of a JSON document that hold no others, each with the path of its keys (`a.b.0`)."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else ()
    for name, below in inner:
        yield from _leaves(below, f"{key}.{name}" if key else str(name))
    if not inner:
        yield key, value
