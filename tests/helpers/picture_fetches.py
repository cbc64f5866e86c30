"""A fetch of pictures as a stage does it, for tests that look at what comes of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.archives.fetch_pictures import PictureFetch
from vlmflow.config.picture_sources import PictureSource
from vlmflow.config.pins import Pin
from vlmflow.pictures.roots import PictureRoots

MAX_BYTES = 1_000_000
"""Of a picture."""


def fetch(
    store: Path,
    sources: dict[str, PictureSource],
    paths: Sequence[str],
    roots: Sequence[str] = (),
    pins: Mapping[str, Pin] = {},
) -> dict[str, Any]:
    """Fetch what two rows each name, and give the account as its file has it."""
    store.mkdir(exist_ok=True, parents=True)
    fetching = PictureFetch(sources, pins, store, MAX_BYTES, "test")
    account = fetching.fetch(dict.fromkeys(paths, 2), PictureRoots([*roots, str(store)], "roots"))
    return msgspec.to_builtins(account)


def pictures_in(store: Path) -> dict[str, bytes]:
    """Give all that lies in a store under a picture's name."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for file in store.rglob("*")
        if file.is_file() and ".archives" not in file.parts
    }
