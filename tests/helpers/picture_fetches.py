"""Fetch pictures as the stage does, for tests that check the result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.tables import PictureSource, Pin
from vlmflow.fetch.fetch_pictures import PictureFetch
from vlmflow.pictures.roots import PictureRoots

MAX_BYTES = 1_000_000
"""The most bytes of a picture."""


def fetch(
    store: Path,
    sources: dict[str, PictureSource],
    paths: Sequence[str],
    roots: Sequence[str] = (),
    pins: Mapping[str, Pin] = {},
) -> dict[str, Any]:
    """Fetch the pictures, each named by two rows, and return the account as in its file."""
    store.mkdir(exist_ok=True, parents=True)
    fetching = PictureFetch(sources, pins, store, MAX_BYTES, "test")
    account = fetching.fetch(dict.fromkeys(paths, 2), PictureRoots([*roots, str(store)], "roots"))
    return msgspec.to_builtins(account)


def pictures_in(store: Path) -> dict[str, bytes]:
    """Return the content of every file in a store that has a picture's name."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for file in store.rglob("*")
        if file.is_file() and ".archives" not in file.parts
    }
