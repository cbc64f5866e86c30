"""The table of perceptual hashes of a split's pictures, computed on all cores, by the pictures' SHA-256."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec

from vlmflow.core.account import read_lines
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.parallel import ordered_map
from vlmflow.core.pod_shares import UNDIVIDED, Part, items_of
from vlmflow.core.progress import Progress
from vlmflow.pictures.formats import open_picture
from vlmflow.pictures.image_manifest import PictureEntry, name_and_digest, read_picture_manifest
from vlmflow.pictures.perceptual_hash import SIDE, perceptual_hash
from vlmflow.pictures.store import refuse_changed_pictures

CHUNK = 16
"""Pictures that a worker takes at a time."""


class PictureHash(msgspec.Struct):
    """One line of the table. sha256: of the original file. hash: 16 hexadecimal digits; null for a plain colour."""

    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")] | None


def hash_pictures(manifest: Path, table: Path, store: Path, processes: int, part: Part = UNDIVIDED) -> None:
    """Write a PictureHash for every usable picture of a manifest, once each, in its order.

    store: the data set's picture store. part: which of these pictures, if several pods share them.

    Raises VlmflowError if a picture differs from the manifest.
    """
    usable = {entry.sha256: entry for entry in read_picture_manifest(manifest) if entry.reason is None}
    entries = list(items_of(part, usable.values()))
    refuse_changed_pictures(store, entries)
    chunks = (entries[first : first + CHUNK] for first in range(0, len(entries), CHUNK))
    encoder = msgspec.json.Encoder()
    with (
        whole_file(table) as file,
        Progress(f"hash_pictures {table}", len(entries), "pictures") as progress,
    ):
        for hashes in ordered_map(partial(_hash_chunk, store), chunks, processes):
            file.write(encoder.encode_lines(hashes))
            progress.advance(len(hashes))


def read_hashes(tables: Iterable[Path]) -> dict[bytes, int]:
    """Return the hashes of several tables by SHA-256, without those of plain colours.

    Raises VlmflowError if a line is damaged.
    """
    lines = chain.from_iterable(read_lines(table, PictureHash) for table in tables)
    return {bytes.fromhex(line.sha256): int(line.hash, 16) for line in lines if line.hash is not None}


def _hash_chunk(store: Path, entries: list[PictureEntry]) -> list[PictureHash]:
    return [PictureHash(name_and_digest(entry)[1], _hash(store, entry)) for entry in entries]


def _hash(store: Path, entry: PictureEntry) -> str | None:
    """Hash a picture as training sees it; a large JPEG is decoded at down to an eighth of its size."""
    file = store / name_and_digest(entry)[0]
    try:
        with open_picture(file) as image:
            if image.size != (entry.width, entry.height):
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels")
            image.draft("L", (2 * SIDE, 2 * SIDE))
            found = perceptual_hash(image)
    except Exception as error:  # hostile bytes make Pillow raise nearly anything
        raise VlmflowError(
            f"{file}: no longer the picture that was checked ({entry.width} x {entry.height} pixels): {error}",
            f"put it back, or resolve the pictures again: make refresh-pictures DATASET={store.name}",
        ) from None
    return None if found is None else f"{found:016x}"
