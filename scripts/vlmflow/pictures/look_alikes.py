"""A picture's perceptual hash: 64 bits that change little when the picture is scaled, recompressed or brightened.

The method is pHash's "DCT based" hash (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions,
2010, section 3.2.1; https://www.phash.org): scale to 32 x 32 grey pixels, take the discrete cosine transform, keep the
8 x 8 lowest frequencies without the constant ones, and set one bit for each that is above their median.

ImageHash, the usual library, is not in the lock files: it needs SciPy and PyWavelets for one product of matrices, and
keeps the constant frequencies.

The table of perceptual hashes of a split's pictures, computed on all cores, by the pictures' SHA-256.

Finds pictures that look like one of the test split: their perceptual hashes differ in few bits.

Hashes that differ in at most d bits differ in at most d // 4 bits in one of four segments of 16 bits, so only such
candidates are compared (M. Norouzi et al., Fast Search in Hamming Space with Multi-Index Hashing, CVPR 2012).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from vlmflow.core.account import read_lines
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.processes import UNDIVIDED, Part, items_of, ordered_map
from vlmflow.core.progress import Progress
from vlmflow.pictures.decode import open_picture
from vlmflow.pictures.manifest import PictureEntry, name_and_digest, read_picture_manifest
from vlmflow.pictures.store import refuse_changed_pictures

BITS = 64
SIDE = 32
LOWEST = 8

FLAT = 2.0
"""The standard deviation of the 32 x 32 grey levels (0 to 255) below which a picture has no hash: all empty pages and
plain colours would look alike."""

_FREQUENCY = np.arange(1, LOWEST + 1)[:, None]
_COSINES = math.sqrt(2 / SIDE) * np.cos(math.pi * _FREQUENCY * (2 * np.arange(SIDE) + 1) / (2 * SIDE))
"""Rows 1 to 8 of the DCT-II matrix, 8 x 32."""

_WEIGHTS = np.uint64(1) << np.arange(BITS, dtype=np.uint64)


def perceptual_hash(image: Image.Image) -> int | None:
    """Return the hash of a picture in any mode, 0 to 2^64 - 1; None for a nearly plain one.

    The distance of two pictures is the number of bits in which their hashes differ (Hamming distance, 0 to 64).
    """
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float64)
    if pixels.std() < FLAT:
        return None
    # A symmetric picture's zeros must be exact.
    frequencies = np.round(_COSINES @ pixels @ _COSINES.T, 3)
    bits = (frequencies > np.median(frequencies)).ravel()
    return int(_WEIGHTS[bits].sum(dtype=np.uint64))


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

    def hash_chunk(chunk: list[PictureEntry]) -> list[PictureHash]:
        return [PictureHash(name_and_digest(entry)[1], _hash(store, entry)) for entry in chunk]

    with whole_file(table) as file, Progress(f"hash_pictures {table}", len(entries), "pictures") as progress:
        for hashes in ordered_map(hash_chunk, chunks, processes):
            file.write(encoder.encode_lines(hashes))
            progress.advance(len(hashes))


def read_hashes(tables: Iterable[Path]) -> dict[bytes, int]:
    """Return the hashes of several tables by SHA-256, without those of plain colours.

    Raises VlmflowError if a line is damaged.
    """
    lines = chain.from_iterable(read_lines(table, PictureHash) for table in tables)
    return {bytes.fromhex(line.sha256): int(line.hash, 16) for line in lines if line.hash is not None}


def _hash(store: Path, entry: PictureEntry) -> str | None:
    """Hash a picture as training sees it; a large JPEG is decoded at down to an eighth of its size."""
    file = store / name_and_digest(entry)[0]
    try:
        with open_picture(file) as image:
            if image.size != (entry.width, entry.height):
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels")
            image.draft("L", (2 * SIDE, 2 * SIDE))
            hashed = perceptual_hash(image)
    except Exception as error:  # hostile bytes make Pillow raise nearly anything
        raise VlmflowError(
            f"{file}: no longer the picture that was checked ({entry.width} x {entry.height} pixels): {error}",
            f"put it back, or resolve the pictures again: vlmflow refresh-pictures FILE {store.name}",
        ) from None
    return None if hashed is None else f"{hashed:016x}"


COMPARED_AT_ONCE = 1 << 22
"""Pairs of hashes in memory, about 30 bytes each."""

SEARCHED_AT_ONCE = 1 << 16
"""Pictures that are searched together: enough to make sorting the test split's cheap in comparison, and few enough for
the processor's caches."""

FARTHEST = 10
"""The largest allowed distance; beyond it, unrelated pictures count as similar."""

SEGMENT = 16
"""Bits of a segment; BITS // SEGMENT = 4."""

Hashes = np.ndarray
"""One-dimensional, uint64."""


class LookAlike(NamedTuple):
    """The nearest picture of the test split: its SHA-256, and the number of the 64 bits in which the hashes differ."""

    sha256: bytes
    distance: int


def find_look_alikes(hashes: Mapping[bytes, int], test: Collection[bytes], distance: int) -> dict[bytes, LookAlike]:
    """Return every picture outside of `test` within `distance` bits of one in `test`, with its nearest one.

    hashes: those of all splits, by the pictures' SHA-256. Among equally near ones, the order of hashes decides.
    """
    if not hashes:
        return {}
    known = set(test)
    by_hash = {hashes[digest]: digest for digest in sorted(known & hashes.keys(), reverse=True)}
    others = [digest for digest in hashes if digest not in known]
    wanted = np.array([hashes[digest] for digest in others], np.uint64)
    given = np.array(sorted(by_hash), np.uint64)
    near: dict[bytes, LookAlike] = {}
    with Progress("comparing with the test split's pictures", len(others), "pictures") as progress:
        for first in range(0, len(others), SEARCHED_AT_ONCE):
            nearest, bits = nearest_hashes(wanted[first : first + SEARCHED_AT_ONCE], given, distance)
            for index in np.flatnonzero(bits >= 0):
                near[others[first + index]] = LookAlike(by_hash[int(given[nearest[index]])], int(bits[index]))
            progress.advance(len(nearest))
    return near


def nearest_hashes(wanted: Hashes, given: Hashes, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every hash of `wanted` the index of the nearest in `given`, and the number of different bits.

    Among equals the first of `given` wins. If none is within `distance` (0 to FARTHEST), the bits are -1.
    """
    nowhere = np.iinfo(np.int64).max
    unique, where = np.unique(wanted, return_inverse=True)
    best = np.full(len(unique), nowhere, np.int64)
    for shift in range(0, BITS, SEGMENT):
        keys, mine = (_segment(hashes, shift) for hashes in (given, unique))
        order = np.argsort(keys, kind="stable")
        edges = np.searchsorted(keys[order], np.arange(2**SEGMENT + 1))
        for flipped in _flips(distance // (BITS // SEGMENT)):
            first = edges[mine ^ flipped]
            counts = edges[(mine ^ flipped) + 1] - first
            for left, right in _candidates(first, counts):
                right = order[right]
                bits = np.bitwise_count(unique[left] ^ given[right]).astype(np.int64)
                near = bits <= distance
                np.minimum.at(best, left[near], bits[near] * len(given) + right[near])
    best = best[where]
    bits, index = np.divmod(best, max(1, len(given)))
    within = best != nowhere
    return np.where(within, index, 0), np.where(within, bits, -1)


def _segment(hashes: Hashes, shift: int) -> np.ndarray:
    return (hashes >> np.uint64(shift) & np.uint64(2**SEGMENT - 1)).astype(np.int64)


def _flips(most: int) -> Iterator[int]:
    """Yield every number of SEGMENT bits with at most `most` ones."""
    for ones in range(most + 1):
        for places in combinations(range(SEGMENT), ones):
            yield sum(1 << bit for bit in places)


def _candidates(first: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pairs (i, j) with first[i] <= j < first[i] + counts[i], about COMPARED_AT_ONCE at a time."""
    filled = np.flatnonzero(counts)
    first, counts = first[filled], counts[filled]
    sums = np.cumsum(counts)
    begin = 0
    while begin < len(filled):
        done = sums[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(sums, done + COMPARED_AT_ONCE, "right")))
        number = counts[begin:end]
        nth = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        yield np.repeat(filled[begin:end], number), np.repeat(first[begin:end], number) + nth
        begin = end
