"""Finds pictures that look like one of the test split: their perceptual hashes differ in few bits.

Hashes that differ in at most d bits differ in at most d // 4 bits in one of four segments of 16 bits, so only such
candidates are compared (M. Norouzi et al., Fast Search in Hamming Space with Multi-Index Hashing, CVPR 2012).
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from vlmflow.core.progress import Progress
from vlmflow.pictures.perceptual_hash import BITS

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
            for place in np.flatnonzero(bits >= 0):
                near[others[first + place]] = LookAlike(by_hash[int(given[nearest[place]])], int(bits[place]))
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
    bits, place = np.divmod(best, max(1, len(given)))
    found = best != nowhere
    return np.where(found, place, 0), np.where(found, bits, -1)


def _segment(hashes: Hashes, shift: int) -> np.ndarray:
    return (hashes >> np.uint64(shift) & np.uint64(2**SEGMENT - 1)).astype(np.int64)


def _flips(most: int) -> Iterator[int]:
    """Yield every number of SEGMENT bits with at most `most` ones."""
    for ones in range(most + 1):
        for places in combinations(range(SEGMENT), ones):
            yield sum(1 << place for place in places)


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
