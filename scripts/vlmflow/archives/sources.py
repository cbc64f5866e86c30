"""The table of picture sources, and which of them has the picture that a row names."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pydantic

from vlmflow.config.picture_source import PictureSource
from vlmflow.config.table import read_table
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.paths import spellings

PICTURE_SOURCES = Path(__file__).absolute().parents[3] / "picture_sources.yaml"
"""The repository's own table."""

_TABLE = pydantic.TypeAdapter(dict[str, PictureSource])


class Place(NamedTuple):
    """Where a picture can be fetched.

    source: the name of its row in the table. member: its name in the archive. name: its path in the store.
    """

    source: str
    member: str
    name: str


def read_sources(over: Mapping[str, PictureSource], path: Path = PICTURE_SOURCES) -> dict[str, PictureSource]:
    """Read the table, with the configuration's sources laid over it, key by key.

    Raises VlmflowError with a line per fault: file, source, key, value, and what is allowed.
    """
    sources = read_table(path, _TABLE)
    for name, source in over.items():
        laid_over = {key: value for key, value in source if value is not None}
        if source.archive or source.one_by_one:
            laid_over.setdefault("by_hand", None)
        sources[name] = sources.get(name, PictureSource()).model_copy(update=laid_over)
    lacking = [
        f"{f'picture_sources.{name}' if name in over else f'{path}: {name}'}.{source.lacks}{_nearest(name, sources)}"
        for name, source in sources.items()
        if source.lacks
    ]
    if lacking:
        raise VlmflowError("\n".join(lacking), "correct it; docs/config.md (picture_sources.NAME) lists every key")
    return sources


def _nearest(name: str, sources: Mapping[str, PictureSource]) -> str:
    """Say which other source may be meant by the name of one that lacks something."""
    near = difflib.get_close_matches(name, [other for other in sources if not sources[other].lacks], n=1)
    return f"; nearest known source: {near[0]}" if near else ""


class Places:
    """Where pictures can be fetched, by the beginnings of their paths.

    sources: by name.
    """

    def __init__(self, sources: Mapping[str, PictureSource]) -> None:
        beginnings = [
            (beginning, name, pattern)
            for name, source in sources.items()
            for beginning, pattern in (source.members or {}).items()
        ]
        self._beginnings = sorted(beginnings, key=lambda item: -len(item[0]))

    def of(self, path: str) -> list[Place]:
        """Give where a picture may be fetched, the likeliest first.

        path: normalised (`pictures.paths.picture_name`). COCO's pictures are found by their number, whatever the year.
        """
        found = []
        for spelling in spellings(path):
            for beginning, source, pattern in self._beginnings:
                if spelling.startswith(beginning):
                    rest = spelling.removeprefix(beginning)
                    member = pattern.replace("{rest}", rest).replace("{name}", rest.rpartition("/")[2])
                    found.append(Place(source, member, spelling))
                    break
        return found
