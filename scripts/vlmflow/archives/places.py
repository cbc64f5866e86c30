"""Which sources have the picture that a row names, and under which name in the archive."""

from collections.abc import Mapping
from typing import NamedTuple

from vlmflow.config.picture_sources import PictureSource
from vlmflow.pictures.paths import spellings


class Place(NamedTuple):
    """Where a picture can be fetched.

    source: the name of its row in the table. member: its name in the archive. name: its path in the store.
    """

    source: str
    member: str
    name: str


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
