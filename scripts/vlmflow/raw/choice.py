"""Refuses tables whose columns cannot be those of a form.

Decides which rows of a raw split are used, by their pictures and source, and draws some of these.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from vlmflow.config.raw_forms import PICTURES, RawForm, form_of, holds_list, may_be_null
from vlmflow.config.settings import RowChoice, Take
from vlmflow.core.errors import VlmflowError, log
from vlmflow.raw.named import reader
from vlmflow.raw.rewritten import spelled
from vlmflow.raw.split import RawRows
from vlmflow.raw.table_file import BYTES, TEXT


def refuse_columns(
    rows: RawRows, kind: str, modality: str | None, columns: Mapping[str, str], take: Take = None
) -> None:
    """Refuse a table that lacks a column which the kind needs, or has one of a wrong type, or two of one meaning.

    Otherwise every single row would be rejected. JSON files pass.

    Raises VlmflowError with the column and its type.
    """
    form = form_of(kind)
    for file in rows.files:
        if file.columns is not None and not form.fixed:
            _refuse_columns(file.path, file.columns, form, modality, columns, take)


def _refuse_columns(
    path: Path, held: Mapping[str, str], form: RawForm, modality: str | None, columns: Mapping[str, str], take: Take
) -> None:
    names = form.names(columns)
    chosen = "chosen" in held and take == "chosen"
    joined = bool(form.joins) and all(columns.get(key, key) in held for key in form.joins)
    for key in set(PICTURES) & names.keys():  # in the letter case of the file
        alike = spelled(held, [names[key]])
        if len(alike) > 1:
            raise VlmflowError(
                f"{path}: the columns {' and '.join(map(repr, alike))} differ only in letter case",
                "rename one of them in the file: both name the pictures of rows",
            )
        names[key] = alike[0] if alike else names[key]
    wanted = [key for key, holds in form.keys.items() if not may_be_null(holds)]
    if modality == "image" and not any(names.get(key) in held for key in ("image", "images")):
        wanted.append("image" if "image" in names else "images")
    for key in wanted:
        if (
            names[key] not in held
            and not (chosen and key in (form.turns, form.answer))
            and not (joined and key == form.turns)
        ):
            raise VlmflowError(
                f"{path}: no column {names[key]!r}; the columns are {', '.join(held)}",
                f"name the right one (datasets.NAME.columns: {{{key}: …}}), or choose another kind or modality",
            )
    for key, holds in form.all_keys.items():
        name = names.get(key)
        if name is None or name not in held or holds is Any:
            continue
        if key in wanted or held[name] != "null":
            _refuse_column(path, key, name, held[name], holds)


def _refuse_column(path: Path, key: str, name: str, column: str, holds: Any) -> None:
    """Refuse a column that does not hold texts, or lists, as its key does; one of pictures may be both, or bytes.

    holds: the type of the key. Lists may be JSON in texts.
    """
    is_list = "list" in column.partition("<")[0]
    takes_list = key in PICTURES or holds not in (str, str | None)
    if column == TEXT or (is_list and takes_list) or (column == BYTES and key in PICTURES):
        return
    if key in PICTURES:
        wanted = "picture, a path, or a list of these"
        advice = "name another column"
    elif holds_list(holds):
        wanted = "list of turns"
        advice = "save the rows as JSON lines, or as parquet with lists there; or name another column"
    else:
        wanted = "text"
        advice = "name another column, or save this one as text"
    raise VlmflowError(f"{path}: column {name!r} holds {column}, not a {wanted}", f"{advice} (datasets.NAME.columns)")


LEFT_OUT = ["", "source_left_out", "not_sampled", "text_only", "has_picture", "not_taken"]
"""What the function from `left_out` returns for a row, by number; the first means that the row is used."""

OF_ANOTHER_MODALITY = {"image": "text_only", "text": "has_picture"}
"""The reason for leaving out a row of the other modality, by the requested one."""


def left_out(rows: RawRows, choice: RowChoice) -> Callable[[int], str]:
    """Return the function that gives, for the number of a row, the reason to leave it out, or "" for a used row.

    Rows are drawn from those of the requested modality, sources and labels. A row of which these cannot be read counts
    as one of them, so that its error becomes visible. If all rows of all sources are used, this function reads
    none of them: the decoder checks their modality. The same files and choice leave out the same rows.
    """
    if choice.takes_all:
        return lambda number: ""
    marks = bytearray(len(rows))
    if choice.take is True:
        not_taken = LEFT_OUT.index("not_taken")
        for number, row in enumerate(rows):
            if number not in rows.faults and not _is_good(row):
                marks[number] = not_taken
    if choice.sources is not None or choice.modality is not None:
        _mark(marks, rows, choice)
    candidates = marks.count(0)
    if choice.samples is not None and choice.samples > candidates:
        log.info(
            "%s: the configuration asks for %s rows (max_samples, or #N after the address); the file has %s, all "
            "are used",
            rows,
            f"{choice.samples:,}",
            f"{candidates:,}",
        )
    if choice.samples is not None and choice.samples < candidates:
        drawn = bytearray(candidates)
        for index in Random(choice.seed).sample(range(candidates), choice.samples):  # noqa: S311
            drawn[index] = 1
        places = iter(drawn)
        not_sampled = LEFT_OUT.index("not_sampled")
        for number, mark in enumerate(marks):
            if not mark and not next(places):
                marks[number] = not_sampled
    return lambda number: LEFT_OUT[marks[number]]


def _mark(marks: bytearray, rows: RawRows, choice: RowChoice) -> None:
    """Mark the rows of another modality than the requested one, and those of other sources."""
    of_another = LEFT_OUT.index(OF_ANOTHER_MODALITY.get(choice.modality or "", ""))
    of_other_source = LEFT_OUT.index("source_left_out")
    has_picture = choice.modality == "image"
    sources = None if choice.sources is None else frozenset(choice.sources)
    read = reader(choice)
    for number, row in enumerate(rows):
        if marks[number] or number in rows.faults or (named := read(row)) is None:
            continue
        if of_another and bool(named.pictures) != has_picture:
            marks[number] = of_another
        elif sources is not None and named.source not in sources:
            marks[number] = of_other_source


class _Labelled(msgspec.Struct):
    """The keys that say whether the answer is a good one, for KTO training."""

    label: Any = None
    kto_tag: Any = None


LABELLED = msgspec.json.Decoder(_Labelled).decode


def _is_good(row: bytes) -> bool:
    """Return whether a row's label calls its answer good: true or 1, also as texts. A row that is no object is good."""
    try:
        labelled = LABELLED(row)
    except (ValueError, RecursionError):  # its error becomes visible
        return True
    label = labelled.kto_tag if labelled.label is None else labelled.label
    return str(label).strip().lower() in ("true", "1", "1.0")
