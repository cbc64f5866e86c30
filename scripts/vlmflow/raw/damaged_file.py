"""What a raw file really is, by its beginning: a wrong name leads every reader astray.

The rows of a damaged JSON array: every sound row, and the text between two sound rows.

No parser can continue after a broken row, so the beginning of the next row must be guessed. A row begins after a comma,
with an object whose first key is one with which rows begin (`,{"image":`). These keys are first learned from everything
sound in the file, so rows may begin in several ways. An object in a list inside a row (a turn) looks like a row, too;
its first key, which also occurs inside sound rows, tells it apart.
"""

import re
import shlex
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import LFS
from vlmflow.core.progress import Progress

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
    (LFS, "a pointer of Git LFS, not the data", "fetch the data: git lfs pull"),
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
    for pattern, kind, next_step in KINDS:
        if re.match(pattern, begins) and not (kind == "parquet" and ending == PARQUET):
            raise VlmflowError(
                f"{path}: {f'its name ends with {path.suffix}, but it' if ending in ENDINGS else 'the file'} is {kind}",
                next_step.replace("{file}", shlex.quote(path.name)),
            )
    if ending != PARQUET:
        _refuse_other_encoding(path, begins)


def not_a_file(path: Path) -> VlmflowError:
    """Return the error for a data file that is a folder, or missing."""
    if any((path / name).is_file() for name in OF_SAVE_TO_DISK):
        return VlmflowError(f"{path} is a folder of `save_to_disk`", FROM_DISK)
    fault = "is a folder, not a file" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
    return VlmflowError(f"{path} {fault}", FIX_THE_PATH)


def to_utf_8(path: Path, is_western: bool = True) -> str:
    """Return what to do about a text in another encoding than UTF-8: of the West, it is most often that of Windows."""
    encoding, it_is = ("WINDOWS-1252", "") if is_western else ("ENCODING", " (ENCODING is its own, such as GB18030)")
    words = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", path.name])
    return f"write it again in UTF-8, and name that file: {words} > {shlex.quote(f'utf-8-{path.name}')}{it_is}"


def _refuse_other_encoding(path: Path, begins: bytes) -> None:
    places = []
    for match in NOT_ASCII.finditer(begins):
        if _is_utf_8(match[0]):
            return
        places.append(len(match[0]))
    if len(places) >= ENOUGH:
        raise VlmflowError(f"{path}: the file is not in UTF-8", to_utf_8(path, max(places) <= 3))


def _is_utf_8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


WHITE = b" \t\r\n"
LONGEST = 1 << 23
"""The most bytes that are read of a value, unless the next guessed row begins later: a bracket may never be closed.

msgspec gives up at about 1,000 open brackets, so no byte is read more often than that, however hostile the file is.
"""

# Possessive (*+): a hostile string of 100 MB must not be retried from every place in it.
STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
FIRST_KEY = re.compile(rb'\{[ \t\r\n]*("(?:[^"\\]|\\.){0,200}+")')
NEXT_OBJECT = re.compile(rb",[ \t\r\n]*(?=" + FIRST_KEY.pattern + rb")")
TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
"""msgspec's message if more follows a sound value: the place, from 1, of the next byte that is not white space."""


class DamagedArray:
    """The array from the bracket at byte `start` to the one at `end`, or to the end of a file that is cut."""

    def __init__(self, content: mmap, path: Path, start: int, end: int) -> None:
        self._content = content
        self._path = path
        self._first = skip_white(content, start + 1)
        self._end = end

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield each row's first byte and the byte after its last, without the white space around it.

        A broken row costs only the text between two sound ones. No row follows a trailing comma before the bracket.

        Raises VlmflowError if the array ends before the file does.
        """
        with Progress(f"{self._path} is damaged: reading it row by row", 2 * self._end, "bytes") as progress:
            begins = self._begins_of_rows(self._keys_of_rows(progress))
            at = self._first
            while at < self._end:
                number = bisect_left(begins, at)
                cut = self._end_of_row(at, begins[number] if number < len(begins) else self._end)
                yield at, without_white(self._content, at, cut)
                progress.advance(self._end + cut - progress.count)
                if cut >= self._end:
                    return
                at = min(skip_white(self._content, cut + 1), self._end)

    def _keys_of_rows(self, progress: Progress) -> set[bytes]:
        """Return the first keys of rows, learned from every run of sound values with commas between them.

        The values of a run are rows if it begins or ends with the array, if one of their first keys is nowhere inside a
        sound value, or if the run is longer than any sound value, and so more than a list inside one broken row.
        """
        of_rows: set[bytes] = set()
        inside: set[bytes] = set()
        doubtful: list[tuple[int, set[bytes]]] = []
        longest = 0
        at, begin, run, is_first = self._first, self._first, set[bytes](), True
        while at < self._end:
            progress.advance(at - progress.count)
            stop = end_of_value(self._content, at, min(self._end, at + LONGEST))
            if stop is not None:
                longest = max(longest, stop - at)
                if key := FIRST_KEY.match(self._content, at, stop):
                    run.add(key[1])
                inside.update(match[1] for match in NEXT_OBJECT.finditer(self._content, at, stop))
                if self._content[stop : stop + 1] == b",":
                    at = skip_white(self._content, stop + 1)
                    continue
                if stop == self._end or self._content[stop] in b"]}":
                    at = stop
            if is_first or (at == self._end < len(self._content)):
                of_rows |= run
            elif not run <= of_rows:
                doubtful.append((at - begin, run))
            match = NEXT_OBJECT.search(self._content, at, self._end)
            at = begin = match.end() if match else self._end
            run, is_first = set(), False
        return of_rows.union(*(run for size, run in doubtful if size > longest or not run <= inside))

    def _begins_of_rows(self, keys: set[bytes]) -> "array[int]":
        """Return the places of the commas after which a row begins with one of these keys."""
        objects = NEXT_OBJECT.finditer(self._content, self._first, self._end)
        return array("q", (match.start() for match in objects if match[1] in keys))

    def _end_of_row(self, start: int, cut: int) -> int:
        """Return the place of the comma or bracket after the row at `start`.

        cut: the comma before the next guessed row. A broken row ends there at the latest. A sound row may end later, if
        an object inside it begins as rows do.
        """
        for limit in (cut, min(self._end, start + LONGEST)):
            stop = end_of_value(self._content, start, limit)
            if stop is not None:
                if stop == self._end or self._content[stop : stop + 1] == b",":
                    return stop
                self._refuse_more_after(stop)
        return self._end_by_brackets(start, cut)

    def _end_by_brackets(self, start: int, cut: int) -> int:
        """Return the place of the first comma outside all brackets of a broken row; `cut` if there is none."""
        depth = 0
        for match in STRING_OR_MARK.finditer(self._content, start, min(cut, start + LONGEST)):
            mark = match[0]
            if mark in b"[{":
                depth += 1
            elif mark in b"]}":
                depth -= 1
            elif mark == b"," and depth == 0:
                return match.start()
            if depth < 0 or mark == b'"':  # a string that never ends
                break
        return cut

    def _refuse_more_after(self, bracket: int) -> None:
        """Refuse text after the array: this bracket closes it after a sound row, and no comma or bracket follows."""
        after = skip_white(self._content, bracket + 1)
        if self._content[bracket] == ord("]") and self._content[after] not in b",]}":
            raise VlmflowError(
                f"{self._path}: the array ends at byte {bracket + 1} of {len(self._content)}, but more text follows",
                "a file must hold one array; fix it or fetch it again",
            )


def end_of_value(content: mmap, start: int, limit: int) -> int | None:
    """Return the first byte after the sound value at `start` and white space; None if no value ends by `limit`."""
    with memoryview(content) as view, view[start:limit] as value:
        try:
            msgspec.json.decode(value, type=msgspec.Raw)
        except msgspec.DecodeError as error:
            trailing = TRAILING.search(str(error))
            return start + int(trailing[1]) - 1 if trailing else None
        except RecursionError:
            return None
    return limit


def without_white(content: mmap, start: int, end: int) -> int:
    """Return the first place from which on there is only white space before `end`, but not one before `start`."""
    while end > start and content[end - 1] in WHITE:
        end -= 1
    return end


def skip_white(content: mmap, start: int) -> int:
    """Return the first place from `start` on that is not white space, or the end of the file."""
    while start < len(content) and content[start] in WHITE:
        start += 1
    return start
