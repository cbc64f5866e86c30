"""A virtual zip of COCO's real size: its bytes are generated on request."""

import bisect
import io
import random
import zipfile
import zlib
from functools import cached_property

MEMBERS = 118_287
SMALLEST, LARGEST = 100_000, 226_000
"""Bytes of a member. The zip has the number of members of COCO's train2017, and their mean size, 163 KB."""

CUTS = 1_000
"""The number of different contents: each member is one of these pieces of a block of noise, with known CRCs."""


class VirtualZip:
    """It has the same bytes in every process.

    names: of its members, in order. size: bytes of the whole zip.
    """

    def __init__(self) -> None:
        chance = random.Random(1)
        noise = memoryview(chance.randbytes(16 << 20))
        cuts = []
        for _ in range(CUTS):
            start = chance.randrange(len(noise) - LARGEST)
            content = noise[start : start + chance.randrange(SMALLEST, LARGEST)]
            cuts.append((content, zlib.crc32(content)))
        self._infos: list[zipfile.ZipInfo] = []
        self._contents: dict[str, memoryview] = {}
        self._starts: list[int] = []
        place = 0
        for number in range(MEMBERS):
            info = zipfile.ZipInfo(f"train2017/{number:012}.jpg")
            self._contents[info.filename], info.CRC = chance.choice(cuts)
            info.file_size = info.compress_size = len(self._contents[info.filename])
            info.header_offset = place
            self._infos.append(info)
            self._starts.append(place)
            place += len(info.FileHeader()) + info.file_size
        self._directory_start = place
        self.names = list(self._contents)

    @cached_property
    def _directory(self) -> bytes:
        file = _Behind(self._directory_start)
        with zipfile.ZipFile(file, "w") as archive:
            archive.filelist.extend(self._infos)
        return file.getvalue()

    @property
    def size(self) -> int:
        return self._directory_start + len(self._directory)

    def content(self, name: str) -> memoryview:
        """Return the content of a member."""
        return self._contents[name]

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Return the bytes from `start` up to `end` (exclusive), in pieces."""
        found = []
        number = max(0, bisect.bisect_right(self._starts, start) - 1)
        while start < min(end, self._directory_start):
            info = self._infos[number]
            place = info.header_offset
            for part in (memoryview(info.FileHeader()), self._contents[info.filename]):
                found.append(part[max(0, start - place) : max(0, end - place)])
                place += len(part)
            start, number = place, number + 1
        if start < end:
            found.append(memoryview(self._directory)[start - self._directory_start : end - self._directory_start])
        return [piece for piece in found if piece]


class _Behind(io.BytesIO):
    """A file that keeps only the bytes after an offset."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place

    def tell(self) -> int:
        return super().tell() + self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(offset - (self._place if whence == io.SEEK_SET else 0), whence) + self._place
