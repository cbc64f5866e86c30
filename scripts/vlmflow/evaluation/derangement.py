"""Gives each item another one as partner, so that each is given once and takes once: a derangement of the nearest.

If one item served many, their results would hang together, and intervals would be too narrow.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

LARGEST = 3000
"""More items of a stratum are split into parts of at most so many: time and memory grow with the square."""

WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Item:
    """Something that takes a partner and is one.

    name: unique. stratum: partners have the same. apart: partners have none of these in common. words: partners have
    many of these in common.
    """

    name: str
    stratum: Hashable
    apart: frozenset[str]
    words: frozenset[str]


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """Return the words of some texts, in one letter case."""
    return frozenset(word for text in texts for word in WORD.findall(text.casefold()))


def derange(items: Sequence[Item], seed: int) -> dict[str, str]:
    """Return the partner of every item that has one, by their names.

    Who gives also takes, each once. As many items as possible have a partner, and of all such choices this one has the
    smallest distance in sum (the assignment problem; Crouse, On implementing 2D rectangular assignment algorithms,
    2016). The distance of two items is the share of their words that only one has, rare words weighing more (weighted
    by log(items / items with the word); Jaccard), so that topics agree.

    seed: decides where strata are split, and between choices that are equally good. The order of items does not count.
    """
    strata: dict[Hashable, list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.name}".encode()).digest()):
        strata[item.stratum].append(item)
    found: dict[str, str] = {}
    for some in strata.values():
        for part in np.array_split(np.arange(len(some)), -(-len(some) // LARGEST)):
            found |= _partners([some[place] for place in part])
    return found


def _partners(items: Sequence[Item]) -> dict[str, str]:
    cost = _distances([item.words for item in items])
    apart = _incidence([item.apart for item in items])
    cost[(apart @ apart.T).nonzero()] = np.inf
    # An item may stay with itself, and is then left out; this costs more than all distances together.
    np.fill_diagonal(cost, len(items) + 1)
    takers, givers = linear_sum_assignment(cost)
    pairs = zip(takers.tolist(), givers.tolist(), strict=True)
    return {items[taker].name: items[giver].name for taker, giver in pairs if taker != giver}


def _distances(words: Sequence[frozenset[str]]) -> NDArray[np.float64]:
    has = _incidence(words)
    weights = np.log(len(words) / np.bincount(has.indices, minlength=has.shape[1]))
    shared = (has.multiply(weights).tocsr() @ has.T).toarray()
    own = shared.diagonal()
    either = np.add.outer(own, own) - shared
    found: NDArray[np.float64] = 1 - np.divide(shared, either, out=np.zeros_like(shared), where=either > 0)
    return found


def _incidence(sets: Sequence[frozenset[str]]) -> csr_matrix:
    """Return a matrix with a row per set and a column per member."""
    numbers: dict[str, int] = {}
    # Sorted, as sums of floats in another order may differ, and then so may the choice.
    columns = [numbers.setdefault(member, len(numbers)) for some in sets for member in sorted(some)]
    starts = np.cumsum([0, *map(len, sets)])
    return csr_matrix((np.ones(len(columns)), columns, starts), shape=(len(sets), len(numbers)))
