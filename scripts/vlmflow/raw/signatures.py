"""What a raw file really is, by its beginning: a wrong name leads every reader astray."""

import re
import shlex
from pathlib import Path

from vlmflow.core.errors import VlmflowError

ANOTHER_FILE = "name another file (datasets.NAME.train, val, test)"
"""What to do about a file without rows."""

FIX_THE_PATH = "fix the path of the data file (config: datasets)"
PACKED = "unpack it, and name the unpacked file (datasets.NAME.train, val, test)"
AS_CSV = "save the table as CSV in UTF-8, and name that file (datasets.NAME.train, val, test)"
AS_UTF_8 = "save the file as UTF-8"
FROM_DISK = (
    'write it as parquet, and name that file: datasets.load_from_disk(FOLDER).to_parquet("rows.parquet"); if it has '
    'several splits, datasets.load_from_disk(FOLDER)["train"].to_parquet("rows.parquet")'
)

KINDS = (
    (rb"\x1f\x8b", "compressed (gzip)", f"{PACKED}: gunzip {{file}}"),
    (rb"BZh[1-9]1AY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|7z\xbc\xaf", "compressed (bzip2, xz, zstd or 7z)", PACKED),
    (rb"PK\x03\x04[\s\S]{26}(?:\[Content_Types\]|_rels/|docProps/|xl/)", "an Excel workbook", AS_CSV),
    (rb"PK\x03\x04", "a ZIP archive", PACKED),
    (rb"\xd0\xcf\x11\xe0", "an old Excel workbook", AS_CSV),
    (rb"PAR1[^\t\r\n -~]", "parquet", "give its name the ending .parquet"),
    (rb"\xff\xff\xff\xff", "in Arrow's form, of `save_to_disk`", FROM_DISK),
    (rb"ARROW1|FEA1", "in Arrow's form", "write it as parquet (datasets: to_parquet)"),
    (rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|[\[{\"]\0|\0[\[{\"]", "in UTF-16 or UTF-32", AS_UTF_8),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the data", "fetch the data: git lfs pull"),
    (
        rb"(?i:(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|\?xml))",
        "a web page",
        "fetch the file again: an address that needs a login gives a page",
    ),
)
"""By the first bytes: what a file is, and what to do with {file}. No JSON, CSV or TSV file of text begins so."""

BEGINNING = 1 << 20
"""Bytes of a file in which its encoding shows."""

ENOUGH = 10
"""The least places of a text, none of them in UTF-8, that show another encoding: a few may be damage, and cost rows."""

OF_SAVE_TO_DISK = ("state.json", "dataset_dict.json")
"""One of these is in each folder of it: of a data set, or of several splits."""

NOT_ASCII = re.compile(rb"[\x80-\xff]+")

PARQUET = ".parquet"
ENDINGS = (".json", ".jsonl", ".csv", ".tsv", PARQUET)
"""What the names of files of rows end with; any other one is read as JSON."""


def refuse_other_kinds(path: Path) -> None:
    """Refuse a raw file whose content is of another kind than its name says; one that is missing passes.

    Raises VlmflowError with what the file is.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(BEGINNING)
    except IsADirectoryError:
        raise not_a_file(path) from None
    except OSError:
        return  # who opens it to read the rows says why
    ending = path.suffix.lower()
    for pattern, what, next_step in KINDS:
        if re.match(pattern, begins) and not (what == "parquet" and ending == PARQUET):
            raise VlmflowError(
                f"{path}: {f'its name ends with {path.suffix}, but it' if ending in ENDINGS else 'the file'} is {what}",
                next_step.replace("{file}", shlex.quote(path.name)),
            )
    if ending != PARQUET:
        _refuse_other_encoding(path, begins)


def not_a_file(path: Path) -> VlmflowError:
    """Return the error for a data file that is a folder, or missing."""
    if any((path / name).is_file() for name in OF_SAVE_TO_DISK):
        return VlmflowError(f"{path} is a folder of `save_to_disk`", FROM_DISK)
    what = "is a folder, not a file" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
    return VlmflowError(f"{path} {what}", FIX_THE_PATH)


def to_utf_8(path: Path, is_western: bool = True) -> str:
    """Return what to do about a text in another encoding than UTF-8: of the West, it is most often that of Windows."""
    encoding, it_is = ("WINDOWS-1252", "") if is_western else ("ENCODING", " (ENCODING is its own, such as GB18030)")
    words = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", path.name])
    return f"write it again in UTF-8, and name that file: {words} > {shlex.quote(f'utf-8-{path.name}')}{it_is}"


def _refuse_other_encoding(path: Path, begins: bytes) -> None:
    places = []
    for place in NOT_ASCII.finditer(begins):
        if _is_utf_8(place[0]):
            return
        places.append(len(place[0]))
    if len(places) >= ENOUGH:
        raise VlmflowError(f"{path}: the file is not in UTF-8", to_utf_8(path, max(places) <= 3))


def _is_utf_8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
