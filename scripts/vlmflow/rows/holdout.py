"""Which pictures are held out of the train split to choose checkpoints by."""

import hashlib
from collections import Counter
from collections.abc import Iterable

from vlmflow.pictures.manifest import PictureEntry


def choose_val_pictures(
    pictures: Iterable[PictureEntry], share: float, seed: int, forbidden: frozenset[bytes]
) -> frozenset[bytes]:
    """Give the SHA-256 digests of the pictures whose rows become the val split.

    Pictures are drawn in an order that seed and content alone decide, until they carry `share` of the rows;
    at least one where the share is more than 0. A picture under two names is one picture, so that no picture
    is in both splits.

    pictures: the manifest of the raw train split, with the rows that name each picture.
    forbidden: digests that are out of the train split anyway.
    """
    rows: Counter[bytes] = Counter()
    for picture in pictures:
        if picture.reason is None and (digest := bytes.fromhex(picture.sha256)) not in forbidden:
            rows[digest] += picture.rows
    wanted = share * rows.total()
    chosen: set[bytes] = set()
    key = str(seed).encode()
    for digest in sorted(rows, key=lambda digest: hashlib.blake2b(digest, key=key).digest()):
        if wanted <= 0:
            break
        chosen.add(digest)
        wanted -= rows[digest]
    return frozenset(chosen)
