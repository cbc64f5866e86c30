"""Compare two output folders byte for byte, except for what always differs between runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SKIPPED = {".snakemake", "logs", "benchmarks", "sample", "tiny-model", "stores"}
"""Snakemake's own records, times, the demo's inputs, and folders that no target names."""

DIFFERENT = re.compile(
    r"""(?x) (.*\.)?
    ( commit | git_commit | seconds | \w+_seconds | \w+_per_second | readable | peak_memory\.\d+ | code(\..*)?
    | target_modules | adapter_config
    )"""
)
"""The keys whose values differ between two runs of the same work: commit, times, speeds, memory, digests of code.

peft writes `target_modules` of adapter_config.json in an order that changes from process to process; with it the file's
digest changes.
"""

FIGURES = re.compile(rb"\b[0-9a-f]{7,40}\b|\d+([.,:]\d+)*")
"""Commits, times and speeds in pages and cards."""


def differences(one: Path, other: Path) -> Iterator[str]:
    """Return a line for each difference between two folders of outputs: the file, and for JSON the key and both values.

    JSON files are compared value by value without the keys of DIFFERENT, pages and cards without FIGURES, all others
    byte by byte.
    """
    for name in sorted({*_files_of(one), *_files_of(other)}):
        here, there = one / name, other / name
        if not here.is_file() or not there.is_file():
            yield f"{name}: only in {one if here.is_file() else other}"
        elif here.read_bytes() != there.read_bytes():
            yield from _of_file(name, here, there)


def _of_file(name: str, here: Path, there: Path) -> Iterator[str]:
    if here.suffix in (".html", ".md"):
        texts = (FIGURES.sub(b"#", file.read_bytes()) for file in (here, there))
        if next(texts) != next(texts):
            yield f"{name}: other words"
    elif here.suffix != ".json":
        yield f"{name}: {here.stat().st_size:,} and {there.stat().st_size:,} bytes"
    else:
        one, other = (dict(_leaves(json.loads(file.read_bytes()))) for file in (here, there))
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key) and not DIFFERENT.fullmatch(key):
                yield f"{name} {key}: {one.get(key, 'nothing')!r:.80} and {other.get(key, 'nothing')!r:.80}"


def _files_of(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [name.as_posix() for name in names if name.parts[0] not in SKIPPED]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values of a JSON document that hold no others, each with the path of its keys (`a.b.0`)."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in inner:
        yield from _leaves(below, f"{key}.{name}" if key else str(name))
    if not inner:
        yield key, value
