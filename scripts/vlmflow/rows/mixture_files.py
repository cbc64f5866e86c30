"""Writes the files of a mixture: rows and pictures under its own names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.pictures.image_manifest import read_picture_manifest
from vlmflow.rows.chat import ASSISTANT, places_answered
from vlmflow.rows.mixture_member import Member
from vlmflow.rows.mixture_names import id_in_mixture, picture_in_mixture, source_in_mixture
from vlmflow.rows.rejects import Reject
from vlmflow.rows.row_counts import QuarantinedRow
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.trained_text import trained_characters

SPLITS = ("train", "val", "test")


class MixtureWriter:
    """Writes the mixture's files.

    last_answer_only: whether the mixture trains the last answers alone. named: by split, the pictures in its rows with
    the number of rows. trained: see `RowStats.trained_characters`.
    """

    def __init__(self, folder: Path, stack: ExitStack, last_answer_only: bool) -> None:
        """Begin the files in `folder`."""
        self._stack = stack
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context(whole_file(folder / f"{name}.jsonl")) for name in (*SPLITS, "quarantine")
        }
        self.last_answer_only = last_answer_only
        self.named: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.trained: Counter[int] = Counter()

    def write(self, member: Member, split: str, row: ShareGptRow, copy: int) -> None:
        """Write a row to a split under its names in the mixture."""
        images = [picture_in_mixture(member.name, name) for name in row.images]
        if member.stats.last_answer_only and not self.last_answer_only:
            row = _with_last_trained(row)
        row = msgspec.structs.replace(
            row, id=id_in_mixture(member.name, row.id, copy), source=source_in_mixture(member.name, row.source)
        )
        self._files[split].write(as_line(row, images) + b"\n")
        self.named[split].update(set(images))
        if split == "train":
            self.trained.update(trained_characters(row, self.last_answer_only))

    def reject(self, member: Member, split: str, number: int, row: ShareGptRow, reject: Reject) -> None:
        """Write a row that is kept out to the quarantine. number: its place in its file, from 0."""
        line = QuarantinedRow(
            split=split,
            row=number,
            reason=reject.reason,
            detail=reject.detail,
            file=str(member.file(split)),
            file_row=number,
            start=None,
            end=None,
            checksum="",
            raw=msgspec.Raw(as_line(row, row.images)),
        )
        self._files["quarantine"].write(msgspec.json.encode(line) + b"\n")

    def write_manifests(self, members: Sequence[Member], manifests: Mapping[str, Path]) -> dict[str, bytes]:
        """Write the image manifest of each split; return the SHA-256 of the pictures of train and val, by name.

        Rows name the pictures as the store does, so both names in an entry are equal.
        """
        files = {split: self._stack.enter_context(whole_file(manifest)) for split, manifest in manifests.items()}
        left = {split: dict(names) for split, names in self.named.items()}
        contents: dict[str, bytes] = {}
        encode = msgspec.json.Encoder().encode
        for member in members:
            for entry in chain.from_iterable(map(read_picture_manifest, member.manifests)):
                if entry.name is None:
                    continue
                name = picture_in_mixture(member.name, entry.name)
                for split, names in left.items():
                    if (rows := names.pop(name, 0)) != 0:
                        renamed = msgspec.structs.replace(entry, path=name, name=name, rows=rows)
                        files[split].write(encode(renamed) + b"\n")
                        if split != "test":
                            contents[name] = member.pictures[entry.name]
        return contents


def _with_last_trained(row: ShareGptRow) -> ShareGptRow:
    """Return a row that says that only its last answer is trained, for a mixture in which others train all."""
    *earlier, (first, _) = places_answered(row.conversations)
    if not earlier:
        return row
    turns = [
        msgspec.structs.replace(turn, loss=number >= first and turn.loss is not False)
        if turn.speaker in ASSISTANT
        else turn
        for number, turn in enumerate(row.conversations)
    ]
    return msgspec.structs.replace(row, conversations=turns)
