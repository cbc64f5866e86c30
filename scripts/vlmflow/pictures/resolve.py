"""Finds the pictures that a split names, decodes each once on all cores, and puts them into the store."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import asdict

from vlmflow.config.settings import PictureLimits, RowChoice
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.core.files import whole_file
from vlmflow.core.processes import joined_lines, ordered_map
from vlmflow.core.progress import Progress
from vlmflow.pictures.decode import Picture, check_picture
from vlmflow.pictures.manifest import REASONS, PictureEntry, Unusable, picture_counts
from vlmflow.pictures.roots import Located, PictureRoots, read_picture
from vlmflow.pictures.store import PictureStore, store_name
from vlmflow.raw.choice import left_out
from vlmflow.raw.found_kind import settled
from vlmflow.raw.named import EMBEDDED, reader
from vlmflow.raw.split import SHARD_BYTES, open_rows

CHUNK = 8
"""Pictures that a worker takes at a time: about 30 ms of decoding, much longer than passing them on."""

LOGGER = logging.getLogger(__name__)

LIMITS = "set picture_limits of the data set, if such pictures are meant"
ADVICE = {
    "path_outside": "copy the pictures into a folder of image_roots (if rows have addresses, download them), and write "
    "paths below a folder into the rows",
    "path_invalid": "write paths of files into the rows",
    "unreadable": "give this user the right to read them",
    "unknown_format": "give pictures in one of these formats",
    "undecodable": "fetch or write the pictures again",
    **dict.fromkeys(("too_many_bytes", "too_many_pixels", "too_small", "too_elongated"), LIMITS),
}
"""What to do if no picture is usable, by the reason of the first one; for the others, to name their folders."""

Found = dict[str, Located | Unusable]
Verdicts = dict[str, Picture | Unusable]


def named_paths(
    raw: Sequence[Path], split: str, choice: RowChoice | None = None, edited: Sequence[Path] = (), processes: int = 1
) -> dict[str, int]:
    """Return every distinct picture path of a raw split, in the order of first appearance, with its number of rows.

    choice: which rows are used; None for all. edited: files of edited rows, see `open_rows`. The result is the same for
    any number of processes.

    An unusable row (not a JSON object, or a path that is not text) names none.
    Raises VlmflowError if a file as a whole cannot be read.
    """
    paths = Counter[str]()
    choice = choice or RowChoice()
    with (
        open_rows(raw, split, edited, choice.read_columns) as rows,
        Progress(f"reading {rows}", len(rows), "rows") as progress,
    ):
        choice = settled(choice, rows)
        reason_left_out, read = left_out(rows, choice), reader(choice)

        def named_in(shard: range) -> tuple[range, dict[str, int]]:
            counts: dict[str, int] = {}
            for number, row in zip(shard, rows.of(shard), strict=True):
                if number in rows.faults or reason_left_out(number):
                    continue
                if (named := read(row)) is not None:
                    for path in dict.fromkeys(named.pictures):
                        counts[path] = counts.get(path, 0) + 1
            return shard, counts

        for shard, counts in ordered_map(named_in, rows.shards(SHARD_BYTES), processes):
            paths.update(counts)
            progress.advance(len(shard))
    return paths


def resolve_pictures(
    paths: Mapping[str, int], roots: PictureRoots, store: PictureStore, limits: PictureLimits, processes: int, work: str
) -> list[PictureEntry]:
    """Find and check every path, and add the usable ones to the store.

    paths: distinct paths as rows write them, with the number of rows.
    work: its name, for the progress.

    Returns one entry for each path, in their order, the same for any number of processes. A file of several paths is
    decoded once. Raises VlmflowError if a disk fails.
    """
    where: Found = {}
    verdicts: Verdicts = {}

    def check(chunk: list[Located]) -> Verdicts:
        return {located.file: _store(store, limits, located) for located in chunk}

    with Progress(work, len(paths), "pictures") as progress:
        for checked in ordered_map(check, _files_to_decode(paths, roots, where, progress), processes):
            verdicts |= checked
            progress.advance(len(checked))
    return list(_entries(paths, where, verdicts, store))


def write_picture_manifest(manifest: Path, entries: list[PictureEntry]) -> None:
    """Write the image manifest, whole or not at all."""
    with whole_file(manifest) as file:
        file.write(msgspec.json.Encoder().encode_lines(entries))


def join_picture_manifests(parts: Sequence[Path], manifest: Path, key: str) -> None:
    """Write the manifest of a split from those of its parts, and log what was found, as `say_what_was_found` does.

    Raises VlmflowError also if the files are not the parts of one manifest.
    """
    with whole_file(manifest) as file:
        say_what_was_found(_written(joined_lines(parts), file), key)


def _written(lines: Iterable[bytes], file: IO[bytes]) -> Iterator[PictureEntry]:
    decode = msgspec.json.Decoder(PictureEntry).decode
    for line in lines:
        file.write(line)
        yield decode(line)


def say_what_was_found(entries: Iterable[PictureEntry], key: str) -> None:
    """Log the number of usable pictures, and the others by reason, missing ones also by source.

    key: the configuration's key of the roots.

    Raises VlmflowError if no picture is usable, and not all are in the data: the roots are then probably wrong.
    """
    first: PictureEntry | None = None

    def seen() -> Iterator[PictureEntry]:
        nonlocal first
        for entry in entries:
            if first is None and not EMBEDDED.fullmatch(entry.path):
                first = entry
            yield entry

    counts = picture_counts(seen())
    rewritten = sum(counts.rewritten.values())
    LOGGER.info("%d pictures named, %d usable, of which %d rewritten", counts.named, counts.usable, rewritten)
    for differs, count in counts.other_names.items():
        LOGGER.info("%d pictures whose files have names that differ in %s", count, differs)
    for format, count in counts.first_frames.items():
        LOGGER.info("%d pictures of %s with several frames, pages or sizes: only the first is used", count, format)
    for reason, cost in counts.unusable.items():
        LOGGER.info("%d pictures, %d rows: %s (%s)", cost.pictures, cost.rows, reason, REASONS[reason])
    for source, cost in counts.missing_by_source.items():
        pictures, rows = counted(cost.pictures, "picture"), counted(cost.rows, "row")
        LOGGER.info("missing, of source %s: %s, %s", source, pictures, rows)
    if first and not counts.usable:
        folders = f"name the folders that hold the pictures under the paths in the rows: {key}"
        raise VlmflowError(
            f"none of {counts.named} pictures can be used; {first.path[:200]!r}: {first.reason}, {first.detail}",
            ADVICE.get(first.reason or "", folders),
        )


def _files_to_decode(
    paths: Mapping[str, int], roots: PictureRoots, where: Found, progress: Progress
) -> Iterator[list[Located]]:
    """Fill `where`, and yield the files to decode in chunks, each file once, while workers decode."""
    files: set[str] = set()
    chunk: list[Located] = []
    for path in paths:
        located = where[path] = roots.locate(path)
        if isinstance(located, Unusable) or located.file in files:
            progress.advance()
            continue
        files.add(located.file)
        chunk.append(located)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _store(store: PictureStore, limits: PictureLimits, located: Located) -> Picture | Unusable:
    content = read_picture(located.file, limits.max_bytes)
    if isinstance(content, Unusable):
        return content
    checked = check_picture(content, limits)
    if isinstance(checked, Unusable):
        return checked
    picture, rgb = checked
    store.add(located, picture, rgb)
    return picture


def _entries(paths: Mapping[str, int], where: Found, verdicts: Verdicts, store: PictureStore) -> Iterator[PictureEntry]:
    first_names: dict[str, str] = {}
    for path, rows in paths.items():
        located = where[path]
        if isinstance(located, Unusable):
            yield PictureEntry(path=path, rows=rows, **asdict(located))
            continue
        file, verdict = located.file, verdicts[located.file]
        entry = PictureEntry(path=path, rows=rows, file=file, **asdict(verdict))
        if not isinstance(verdict, Unusable):
            if (first := first_names.setdefault(file, located.name)) != located.name:
                store.link(located, verdict, store_name(Located(first, file), verdict))
            entry.name, entry.differs = store_name(located, verdict), located.differs
        yield entry
