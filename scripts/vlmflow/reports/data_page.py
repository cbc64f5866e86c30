"""The data page: one HTML file that says what a data set holds, what it lost, and why."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vlmflow.config.row_settings import NearDuplicates, PictureLimits
from vlmflow.core.files import read_json
from vlmflow.reports.chart import chart
from vlmflow.reports.data_facts import (
    FILES,
    REJECTS_PER_REASON,
    SAMPLES,
    RowFacts,
    by_reason,
    first_rejects,
    longer_sides,
    row_facts,
)
from vlmflow.reports.data_template import TEMPLATE
from vlmflow.reports.histogram import Histogram, whole_bins, wide_bins
from vlmflow.reports.look_alikes_section import near_section
from vlmflow.reports.pages import explain, form_of, raw_splits, rejects, rows_left_out, unread, went
from vlmflow.reports.thumbnails import thumbnail
from vlmflow.rows.data_rows import Row
from vlmflow.rows.rejects import HARMLESS, LEFT_OUT
from vlmflow.rows.row_counts import QuarantinedRow

SOURCES_SHOWN = 20
UNREAD_SHOWN = 50
THUMBNAIL = 420
"""Pixels of a sample's longer side."""

TURNS_SHOWN = 6
CHARACTERS_SHOWN = 500
RAW_SHOWN = 1_500
"""Characters of a turn, and of a rejected row."""

KINDS = {
    "kept": "kept",
    "row": "rejected for what the row says",
    "picture": "rejected for the picture",
    "again": "rejected as duplicates or leaks",
    "unasked": "not asked for, left out",
}


def data_page(
    data: Path,
    manifests: Mapping[str, Path],
    store: Path,
    limits: PictureLimits,
    near_duplicates: NearDuplicates,
) -> str:
    """Give the page.

    data: the data set's folder, as `validate_sharegpt` and `find_near_duplicates` left it.
    manifests: the image manifest of each raw split. store: the data set's picture store. limits: of its pictures.
    near_duplicates: how they were looked for, and whether their train rows were rejected.

    Raises VlmflowError where a file holds a damaged line.
    """
    stats = read_json(data / "stats.json")
    facts = {name: row_facts(data / f"{name}.jsonl", SAMPLES.get(name, 0)) for name in FILES}
    facts = {name: found for name, found in facts.items() if found.turns.count}
    splits = [_split(name, stats[name]) for name in raw_splits(stats)]
    near = near_section(data / "near_duplicates.jsonl", store, limits, near_duplicates, bool(manifests))
    checked = store if manifests else None
    return TEMPLATE.render(
        title=f"{stats['dataset']}: the data",
        subtitle=f"{form_of(stats)}, made from {_and(map(_files, stats['raw'].values()))}",
        tiles=_tiles(stats, splits),
        splits=splits,
        reasons=_reasons(by_reason(stats, rejects), first_rejects(data / "quarantine.jsonl")),
        left_out=_reasons(by_reason(stats, rows_left_out), {}),
        unread=_unread(stats),
        **_sources(stats),
        row_charts=_row_charts(facts),
        pictures=[_pictures(name, counts) for name, counts in stats["pictures"].items() if counts],
        picture_charts=_picture_charts({split: longer_sides(file) for split, file in manifests.items()}),
        near=near if stats["examples"]["test"] else None,
        samples=[_sample(name, row, checked, limits) for name, found in facts.items() for row in found.samples],
        quarantine=f"{data}/quarantine.jsonl",
        per_reason=REJECTS_PER_REASON,
    )


def _files(raw: list[dict[str, Any]]) -> str:
    """Name the files of one raw split."""
    first = Path(raw[0]["file"]).name
    return first if len(raw) == 1 else f"{first} ({len(raw)} files)"


def _tiles(stats: dict[str, Any], splits: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows_in, kept, rejected, left_out = map(sum, zip(*(went(stats[split["name"]]) for split in splits), strict=True))
    notes = dict.fromkeys(FILES, "rows")
    if "test" not in stats and not stats["settings"]["test_share"]:
        notes["test"] = "rows: there is no raw test split, and test_share is 0"
    files = [(f"{name}.jsonl", f"{stats['examples'][name]:,}", notes[name]) for name in FILES]
    pictures = [counts for counts in stats["pictures"].values() if counts]
    named, usable = (sum(counts[key] for counts in pictures) for key in ("named", "usable"))
    return [
        ("raw rows in", f"{rows_in:,}", f"{_and(split['name'] for split in splits)}"),
        ("kept", f"{kept:,}", f"{kept / (rows_in or 1):.1%} of them"),
        ("rejected", f"{rejected:,}", f"{rejected / (rows_in or 1):.1%}, with reasons"),
        *([("left out", f"{left_out:,}", "not asked for")] if left_out else []),
        *files,
        *([("usable pictures", f"{usable:,}", f"of {named:,} named")] if pictures else []),
    ]


def _kind(reason: str) -> str:
    if reason in LEFT_OUT:
        return "unasked"
    if reason in HARMLESS:
        return "again"
    return "picture" if reason.startswith("picture_") else "row"


def _split(name: str, counts: dict[str, Any]) -> dict[str, Any]:
    lost = dict.fromkeys(KINDS, 0) | {"kept": counts["kept"]}
    for reason, count in counts["rejected"].items():
        lost[_kind(reason)] += count
    parts = [
        {"kind": kind, "label": label, "count": lost[kind]}
        for kind, label in KINDS.items()
        if lost[kind] or kind != "unasked"
    ]
    return {"name": name, "rows_in": counts["rows_in"], "kept": counts["kept"], "parts": parts}


def _reasons(table: dict[str, dict[str, int]], examples: dict[str, list[QuarantinedRow]]) -> list[dict[str, Any]]:
    most = max((sum(counts.values()) for counts in table.values()), default=1)
    return [
        {
            "name": reason,
            "kind": _kind(reason),
            "counts": counts,
            "total": sum(counts.values()),
            "share": sum(counts.values()) / most,
            "meaning": explain(reason),
            "examples": [_reject(row) for row in examples.get(reason, [])],
        }
        for reason, counts in table.items()
    ]


def _reject(row: QuarantinedRow) -> dict[str, Any]:
    raw = bytes(row.raw).decode(errors="replace")
    shown = raw if len(raw) <= RAW_SHOWN else f"{raw[:RAW_SHOWN]} … {len(raw) - RAW_SHOWN:,} more characters"
    place = {key: getattr(row, key) for key in ("split", "row", "file", "file_row", "start", "end", "detail")}
    return {**place, "raw": shown}


def _unread(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Give what of the rows nobody reads, the most frequent first."""
    table: dict[str, dict[str, int]] = {}
    for split in raw_splits(stats):
        for what, count in unread(stats, split).items():
            table.setdefault(what, {})[split] = count
    ranked = sorted(table.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return [{"name": what, "counts": counts} for what, counts in ranked[:UNREAD_SHOWN]]


def _sources(stats: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, dict[str, int]] = {}
    for split, sources in stats["kept_by_source"].items():
        for source, count in sources.items():
            table.setdefault(source, {})[split] = count
    ranked = sorted(table.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    most = sum(ranked[0][1].values()) if ranked else 1
    shown = [
        {"name": source, "counts": counts, "shares": {split: count / most for split, count in counts.items()}}
        for source, counts in islice(ranked, SOURCES_SHOWN)
    ]
    return {"sources": shown, "more_sources": len(ranked) - len(shown)}


def _row_charts(facts: dict[str, RowFacts]) -> list[dict[str, Any]]:
    turns, scores, characters, answers = (
        {name: getattr(found, measure) for name, found in facts.items()}
        for measure in ("turns", "scores", "characters", "answers")
    )
    charts = [
        chart("Turns of a row", "turns, human and gpt together", turns, whole_bins(turns)),
        chart("Scores of the answers", "score, 0 to 10", scores, whole_bins(scores, range(11))),
        chart("Text of a row", "characters, all turns together", characters, wide_bins(characters)),
        chart("Text of an answer", "characters of a gpt turn", answers, wide_bins(answers)),
    ]
    return [drawn for drawn in charts if drawn["names"]]


def _picture_charts(sides: dict[str, Histogram]) -> list[dict[str, Any]]:
    drawn = chart("Size of the usable pictures", "pixels, longer side", sides, wide_bins(sides))
    return [drawn] if drawn["names"] else []


def _pictures(split: str, counts: dict[str, Any]) -> dict[str, Any]:
    unusable, missing = (
        [(name, cost["pictures"]) for name, cost in counts[key].items()] for key in ("unusable", "missing_by_source")
    )
    ranked = [
        sorted(cell, key=lambda item: (-item[1], item[0]))
        for cell in (counts["formats"].items(), counts["rewritten"].items(), unusable, missing)
    ]
    return {"name": split, "named": counts["named"], "usable": counts["usable"], "cells": ranked}


def _sample(file: str, row: Row, store: Path | None, limits: PictureLimits) -> dict[str, Any]:
    """Give a row as the page shows it; store: None where pictures were skipped, and their names were never checked."""
    turns = [
        (turn.speaker, turn.value[:CHARACTERS_SHOWN], max(0, len(turn.value) - CHARACTERS_SHOWN))
        for turn in row.conversations[:TURNS_SHOWN]
    ]
    return {
        "file": file,
        "id": row.id,
        "source": row.source,
        "pictures": [(thumbnail(store / name, THUMBNAIL, limits) if store else None, name) for name in row.images],
        "scores": "scores " + ", ".join(f"{score:g}" for score in row.scores) if row.scores else "",
        "turns": turns,
        "more": max(0, len(row.conversations) - TURNS_SHOWN),
    }


def _and(names: Any) -> str:
    return " and ".join(names)
