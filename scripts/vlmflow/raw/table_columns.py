"""Refuses tables whose columns cannot be those of a form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmflow.config.raw_forms import PICTURES, RawForm, form_of, holds_list, may_be_null
from vlmflow.config.row_settings import Take
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.row_keys import spelled
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
        what = "picture, a path, or a list of these"
        advice = "name another column"
    elif holds_list(holds):
        what = "list of turns"
        advice = "save the rows as JSON lines, or as parquet with lists there; or name another column"
    else:
        what = "text"
        advice = "name another column, or save this one as text"
    raise VlmflowError(f"{path}: column {name!r} holds {column}, not a {what}", f"{advice} (datasets.NAME.columns)")
