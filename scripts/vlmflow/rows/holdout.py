"""Chooses the pictures, or the prompts of rows without pictures, that are held out of the train split."""

import hashlib
from collections.abc import Mapping


def hold_out(rows: Mapping[bytes, int], share: float, key: str, forbidden: frozenset[bytes]) -> frozenset[bytes]:
    """Return the groups (digests of pictures or prompts) whose rows are held out.

    Groups are taken in an order that depends only on the key and their digests, until they have `share` of the rows. If
    the share is more than 0, at least one is taken. A group is held out as a whole, so that no group is in two splits.

    rows: the number of usable rows of each group, at least 1. key: at most 64 bytes; another key gives another order.
    forbidden: groups that are not in the train split anyway; their rows do not count.
    """
    free = rows.keys() - forbidden
    wanted = share * sum(rows[digest] for digest in free)
    chosen: set[bytes] = set()
    for digest in sorted(free, key=lambda digest: hashlib.blake2b(digest, key=key.encode()).digest()):
        if wanted <= 0:
            break
        chosen.add(digest)
        wanted -= rows[digest]
    return frozenset(chosen)
