"""The pictures that a split names: each found, decoded once over all cores, and put into the store."""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from vlmflow.config.data_settings import PictureLimits
from vlmflow.errors import VlmflowError
from vlmflow.files import whole_file
from vlmflow.json_rows import JsonRows
from vlmflow.parallel import ordered_map
from vlmflow.pictures.account import picture_counts
from vlmflow.pictures.check import Picture, check_picture
from vlmflow.pictures.manifest import REASONS, PictureEntry, Unusable
from vlmflow.pictures.roots import Located, PictureRoots, read_picture
from vlmflow.pictures.store import PictureStore, store_name
from vlmflow.progress import Progress

CHUNK = 8
"""Pictures that a worker takes at a time: some 30 ms of decoding, beside which handing over is little."""

LOGGER = logging.getLogger(__name__)

Found = dict[str, Located | Unusable]
Verdicts = dict[str, Picture | Unusable]


class _Row(msgspec.Struct):
    image: str | None = None


def named_paths(raw: Path) -> dict[str, int]:
    """Give every distinct picture path of a raw file, in the order of first appearance, with its rows.

    A row that is no JSON object, or has no text under "image", names none. Raises VlmflowError where the file
    as a whole cannot be read.
    """
    decoder = msgspec.json.Decoder(_Row)
    paths: dict[str, int] = {}
    with JsonRows(raw) as rows:
        for row in rows:
            try:
                path = decoder.decode(row).image
            except (ValueError, RecursionError):
                continue
            if path is not None:
                paths[path] = paths.get(path, 0) + 1
    return paths


def resolve_pictures(
    paths: Mapping[str, int],
    roots: PictureRoots,
    store: PictureStore,
    limits: PictureLimits,
    processes: int,
    progress: Progress,
) -> list[PictureEntry]:
    """Find and check every path, and give the usable ones their names in the store.

    paths: distinct paths as rows write them, with the number of rows.
    progress: counts paths.

    Gives one entry for each path, in their order, the same whatever the number of processes. A file that
    several paths mean is decoded once. Raises VlmflowError where a disk fails.
    """
    found: Found = {}
    verdicts: Verdicts = {}
    check = partial(_check_chunk, store, limits)
    for chunk in ordered_map(check, _files_to_check(paths, roots, found, progress), processes):
        verdicts.update(chunk)
        progress.advance(len(chunk))
    return list(_entries(paths, found, verdicts, store))


def write_picture_manifest(manifest: Path, entries: list[PictureEntry]) -> None:
    """Write the image manifest, whole or not at all."""
    with whole_file(manifest) as file:
        file.write(msgspec.json.Encoder().encode_lines(entries))


def say_what_was_found(entries: list[PictureEntry], key: str) -> None:
    """Log how many pictures are usable, and what is wrong with the others, the missing ones by source.

    key: where the configuration names the roots.

    Raises VlmflowError where not one of the pictures is usable: the roots are then not what the rows mean.
    """
    counts = picture_counts(entries)
    rewritten = sum(counts["rewritten"].values())
    LOGGER.info("%d pictures named, %d usable, %d of these rewritten", counts["named"], counts["usable"], rewritten)
    for reason, cost in counts["unusable"].items():
        LOGGER.info("%d pictures, %d rows: %s (%s)", cost["pictures"], cost["rows"], reason, REASONS[reason])
    for source, cost in counts["missing_by_source"].items():
        LOGGER.info("missing from %s: %d pictures, %d rows", source, cost["pictures"], cost["rows"])
    if entries and not counts["usable"]:
        first = entries[0]
        raise VlmflowError(
            f"not one of {len(entries)} pictures can be used; {first.path!r}: {first.reason}, {first.detail}",
            f"name the folders that hold the pictures under the rows' own paths: {key}",
        )


def _files_to_check(
    paths: Mapping[str, int], roots: PictureRoots, found: Found, progress: Progress
) -> Iterator[list[Located]]:
    """Fill `found`, and yield what is to be decoded in chunks, each file once, while workers decode."""
    files: set[str] = set()
    chunk: list[Located] = []
    for path in paths:
        place = found[path] = roots.locate(path)
        if isinstance(place, Unusable) or place.file in files:
            progress.advance()
            continue
        files.add(place.file)
        chunk.append(place)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _check_chunk(
    store: PictureStore, limits: PictureLimits, chunk: list[Located]
) -> list[tuple[str, Picture | Unusable]]:
    return [(located.file, _check(store, limits, located)) for located in chunk]


def _check(store: PictureStore, limits: PictureLimits, located: Located) -> Picture | Unusable:
    content = read_picture(located.file, limits.max_bytes)
    if isinstance(content, Unusable):
        return content
    checked = check_picture(content, limits)
    if isinstance(checked, Unusable):
        return checked
    picture, rgb = checked
    store.add(located, picture, rgb)
    return picture


def _entries(paths: Mapping[str, int], found: Found, verdicts: Verdicts, store: PictureStore) -> Iterator[PictureEntry]:
    first_names: dict[str, str] = {}
    for path, rows in paths.items():
        match found[path]:
            case Unusable(reason=reason, detail=detail):
                yield PictureEntry(path=path, rows=rows, reason=reason, detail=detail)
            case Located(name=name, file=file) as located:
                verdict = verdicts[file]
                if isinstance(verdict, Unusable):
                    yield PictureEntry(path=path, rows=rows, reason=verdict.reason, detail=verdict.detail, file=file)
                    continue
                if first_names.setdefault(file, name) != name:
                    store.link(located, verdict)
                yield PictureEntry(
                    path=path,
                    rows=rows,
                    name=store_name(located, verdict),
                    file=file,
                    **msgspec.structs.asdict(verdict),
                )
