"""What a raw file really is, by its first bytes: a wrong name leads every reader astray."""

import re
from pathlib import Path

from vlmflow.core.errors import VlmflowError

ANOTHER_FILE = "name another file (datasets.NAME.train, val, test)"
"""What to do about a file without rows."""

PACKED = "unpack it, and name the unpacked file (datasets.NAME.train, val, test)"
AS_CSV = "save the table as CSV in UTF-8, and name that file (datasets.NAME.train, val, test)"
AS_UTF_8 = "save the file as UTF-8"

KINDS = (
    (rb"\x1f\x8b", "compressed (gzip)", PACKED),
    (rb"BZh[1-9]1AY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|7z\xbc\xaf", "compressed (bzip2, xz, zstd or 7z)", PACKED),
    (rb"PK\x03\x04[\s\S]{26}(?:\[Content_Types\]|_rels/|docProps/|xl/)", "an Excel workbook", AS_CSV),
    (rb"PK\x03\x04", "a ZIP archive", PACKED),
    (rb"\xd0\xcf\x11\xe0", "an old Excel workbook", AS_CSV),
    (rb"PAR1[^\t\r\n -~]", "parquet", "give its name the ending .parquet"),
    (rb"ARROW1|FEA1|\xff\xff\xff\xff", "in Arrow's form", "write it as parquet (datasets: to_parquet)"),
    (rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|[\[{\"]\0|\0[\[{\"]", "in UTF-16 or UTF-32", AS_UTF_8),
    (
        rb"(?i:(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|\?xml))",
        "a web page",
        "fetch the file again: an address that needs a login gives a page",
    ),
)
"""By the first bytes: what a file is, and what to do. No JSON, CSV or TSV file of text begins so."""

PARQUET = ".parquet"
ENDINGS = (".json", ".jsonl", ".csv", ".tsv", PARQUET)
"""What the names of files of rows end with; any other one is read as JSON."""


def refuse_other_kinds(path: Path) -> None:
    """Refuse a raw file whose content is of another kind than its name says; one that is missing passes.

    Raises VlmflowError with what the file is.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(64)
    except OSError:
        return  # who opens it to read the rows says why
    for pattern, what, next_step in KINDS:
        if re.match(pattern, begins) and not (what == "parquet" and path.suffix.lower() == PARQUET):
            of_rows = path.suffix.lower() in ENDINGS
            raise VlmflowError(
                f"{path}: {f'its name ends with {path.suffix}, but it' if of_rows else 'the file'} is {what}", next_step
            )
