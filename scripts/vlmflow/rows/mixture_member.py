"""A data set of a mixture: its validated rows, and what no other split may have of them."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.image_manifest import KnownPicture, contents_digest, name_and_digest, read_picture_manifest
from vlmflow.rows.data_rows import lines_of
from vlmflow.rows.rejects import Reject
from vlmflow.rows.row_check import Grouping
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.stats import Stats


@dataclass(frozen=True)
class Member:
    """A data set that is mixed.

    drawn: how much of its train rows: a value of `mix`. folder: its validated rows. stats: its account. manifests: its
    image manifests; none without pictures.
    """

    name: str
    drawn: str
    folder: Path
    stats: Stats
    manifests: Sequence[Path] = ()

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The SHA-256 of its usable pictures, by their names in its store."""
        entries = chain.from_iterable(read_picture_manifest(manifest, KnownPicture) for manifest in self.manifests)
        named = (name_and_digest(entry) for entry in entries if entry.name is not None)
        return {name: bytes.fromhex(sha256) for name, sha256 in named}

    def file(self, split: str) -> Path:
        """Return where the validated rows of a split are; an empty split has an empty file."""
        return self.folder / f"{split}.jsonl"

    def rows(self, split: str) -> Iterator[ShareGptRow]:
        """Yield the validated rows of a split, in the order of its file."""
        return lines_of(self.file(split), ShareGptRow)

    def parts_of(self, row: ShareGptRow) -> list[bytes]:
        """Return what no two splits may share of a row (`row_check.Grouped.parts`).

        Raises VlmflowError if no image manifest has a picture.
        """
        if not row.images:
            found = Grouping(None, None, self.stats.one_prompt).parts_of(row)
            assert not isinstance(found, Reject)
            return found[1]
        try:
            return [self.pictures[name] for name in row.images]
        except KeyError as error:
            raise VlmflowError(
                f"{self.folder}: row {row.id}: no image manifest has picture {error}",
                f"check its pictures again: make refresh-pictures DATASET={self.name}",
            ) from None

    def refuse_other_pictures(self, named: Set[str]) -> None:
        """Refuse pictures that are others than its account records. named: those of its train and val rows."""
        if contents_digest({name: self.pictures[name] for name in named}) != self.stats.digests["pictures"]:
            raise VlmflowError(
                f"{', '.join(map(str, self.manifests))}: {self.folder / 'stats.json'} records other digests for these "
                "pictures",
                f"check them again: make refresh-pictures DATASET={self.name}",
            )
