"""Derives from a row's path the picture's name in the store, and the spellings to search for."""

import re
from functools import lru_cache

from vlmflow.pictures.image_manifest import Unusable

HOUSEKEEPING = ".archives"
"""The folder in the store of fetched pictures for zips' directories, archives during their download, and locks; no
picture's path may begin with it."""

REWRITTEN_SUFFIX = ".rgb.png"
"""The end of a rewritten picture's name in the store; no other name may have it."""

LONGEST_PATH = 500
LONGEST_PART = 255 - len(REWRITTEN_SUFFIX)
"""Bytes. 255 is Linux' NAME_MAX; no data set has longer paths."""

CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DRIVE = re.compile(r"[A-Za-z]:")

COCO = re.compile(
    r"(?P<before>(?:.*/)?)(?P<split>(?:train|val)(?:2014|2017))/"
    r"(?:COCO_(?:train|val)2014_)?(?P<number>[0-9]{1,12})\.jpg",
    re.IGNORECASE,
)
COCO_SPLITS = ("train2017", "val2017", "train2014", "val2014")
"""2014 and 2017 have the same pictures and numbers in different splits."""

BARE_MATHVISTA = re.compile(r"images/[0-9]+\.jpg")


@lru_cache(1 << 10)
def picture_name(path: str) -> str | Unusable:
    r"""Return the store name of a path as rows write it: with `/` for `\`, without empty and `.` parts."""
    name = "/".join(part for part in path.replace("\\", "/").split("/") if part not in ("", "."))
    outside = (
        (path[:1] in ("/", "\\"), "an absolute path outside of the roots"),
        (ADDRESS.match(path.replace("\\", "/")), "an address"),
        (DRIVE.match(path), "a path with a drive letter"),
        (".." in name.split("/"), "a path with '..'"),
    )
    for found, what in outside:
        if found:
            return Unusable("path_outside", f"{what}; pictures are in a root, or named relative to it")
    invalid = (
        (not name, "no file name"),
        (CONTROL_CHARACTER.search(name), "a control character"),
        (not is_text(name), "a character that is not Unicode text"),
        # The trainer (ms-swift, load_file) strips white space, and opens a name with http at its start as an address.
        (name != name.strip(), "white space at the beginning or end"),
        (name.startswith("http"), "begins with 'http', which the trainer takes for an address"),
        (len(_bytes(name)) > LONGEST_PATH, f"longer than {LONGEST_PATH} bytes"),
        (
            any(len(_bytes(part)) > LONGEST_PART for part in name.split("/")),
            f"a part over {LONGEST_PART} bytes",
        ),
        (any(part.endswith(REWRITTEN_SUFFIX) for part in name.split("/")), f"{REWRITTEN_SUFFIX} is reserved"),
        (name.split("/")[0].casefold() == HOUSEKEEPING, f"{HOUSEKEEPING} is reserved"),
    )
    for found, what in invalid:
        if found:
            return Unusable("path_invalid", what)
    return name


@lru_cache(1 << 10)
def spellings(name: str) -> tuple[str, ...]:
    """Return the possible paths of a picture, its own first.

    COCO's pictures are searched by number in 2014 and 2017, with and without the prefix of the 2014 files (FIRE and
    Volcano omit it). Some rows of MathVista omit their folder.
    """
    found = [name]
    if BARE_MATHVISTA.fullmatch(name):
        found.append(f"mathvista/{name}")
    if coco := COCO.fullmatch(name):
        number = f"{int(coco['number']):012}.jpg"
        for split in dict.fromkeys((coco["split"].lower(), *COCO_SPLITS)):
            found.append(f"{coco['before']}{split}/{number}")
            if split.endswith("2014"):
                found.append(f"{coco['before']}{split}/COCO_{split}_{number}")
    return tuple(dict.fromkeys(found))


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8; half of a surrogate pair cannot."""
    return name.encode("utf-8", "ignore").decode() == name


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "replace")
