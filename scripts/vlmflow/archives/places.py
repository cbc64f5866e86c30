"""Finds the sources of a picture that a row names, and its name in their archives."""

from collections.abc import Mapping
from typing import NamedTuple

from vlmflow.config.picture_sources import PictureSource
from vlmflow.pictures.paths import spellings


class Place(NamedTuple):
    """A place from which a picture can be fetched.

    source: its row's name in the table of sources. member: its name in the archive. name: its path in the store.
    """

    source: str
    member: str
    name: str


class Places:
    """Finds places of pictures by the beginnings of their paths.

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
        """Return the places from which a picture may be fetched, the likeliest first; [] if no source matches.

        path: normalised (`pictures.paths.picture_name`). A picture of COCO is found by its number, in any year's split.
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
