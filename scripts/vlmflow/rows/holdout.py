"""Which pictures, or prompts of rows without pictures, are held out of the train split."""

import hashlib
from collections.abc import Mapping


def hold_out(rows: Mapping[bytes, int], share: float, key: str, forbidden: frozenset[bytes]) -> frozenset[bytes]:
    """Give the groups (digests of pictures or prompts) whose rows are held out.

    Groups are drawn in an order that key and content alone decide, until they carry `share` of the rows; at least
    one where the share is more than 0. A group is held out whole, so that none is in two splits.

    rows: how many usable rows each group has; one without any would hold nothing out.
    forbidden: groups that are out of the train split anyway; their rows do not count.
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
