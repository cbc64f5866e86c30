"""Finds and reads files in the folders with a data set's pictures, and nowhere else."""

import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import msgspec

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.pictures.manifest import Unusable, is_text, picture_name, spellings

NO_SUCH_NAME = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""A file system's errors for a name that it does not have, or cannot have (a colon on NTFS)."""


UNICODE_FORM = "unicode form"
LETTER_CASE = "letter case"


class Located(msgspec.Struct, frozen=True):
    """A path with its file.

    name: the normalised path: its name in the picture store, the same on every machine.
    file: its regular file, absolute, without links.
    differs: in what the file's own name differs from the path (or one of its spellings): UNICODE_FORM, or LETTER_CASE,
    perhaps with the form; None if in nothing.
    """

    name: str
    file: str
    differs: str | None = None


def same_form(name: str) -> str:
    """Return a name in the one form in which names that look alike are equal: composed (NFC), with plain spaces.

    ² and 2 do not look alike: NFKC would take one for the other.
    """
    if name.isascii():
        return name
    spaced = "".join(" " if unicodedata.category(char) == "Zs" else char for char in name)
    return unicodedata.normalize("NFC", spaced)


def same_case(name: str) -> str:
    """Return a name without differences in Unicode form and letter case."""
    return name.lower() if name.isascii() else same_form(same_form(name).casefold())


FOLDS: dict[str, Callable[[str], str]] = {UNICODE_FORM: same_form, LETTER_CASE: same_case}
"""How names are compared that are not exact, by what differs, the closest first."""


NAMED = 3
"""Files that a message about an ambiguous name gives."""


class PictureRoots:
    """The folders with a data set's pictures.

    Folders are read once and remembered, so that a picture costs one system call if its path is exact, and a folder is
    listed only if a path in it is not. Use the object for one run: it does not notice changes on disk.

    roots: the folders; the first one that has a picture wins.
    key: the configuration's key of them, for error messages.

    Raises VlmflowError if one is not a readable folder.
    """

    def __init__(self, roots: Sequence[str], key: str) -> None:
        self._roots = [_readable_root(root, key) for root in roots]
        self._written = [os.path.abspath(Path(root).expanduser()) for root in roots]
        self._key = key
        self._inside = tuple(os.path.join(root, "") for root in self._roots)
        self._folder = cache(self._find_folder)
        self._folders_like = cache(self._find_folders_like)
        self._listing = cache(self._list_folder)
        self._conflict = cache(self._find_conflict)

    def locate(self, path: str) -> Located | Unusable:
        """Return the file of a row's path, or why there is none.

        An exact path in any root wins over one that differs in Unicode form, and this over one that differs in letter
        case. An absolute path is looked for in its own root, and has the name of the same path below it.

        Raises VlmflowError if there is no folder at all, or the disk itself fails.
        """
        if not self._roots:
            raise VlmflowError(
                f"rows name pictures ({path[:200]!r}), and {self._key} no folder",
                f"name the folders that hold the pictures: {self._key}; or leave rows with pictures out: "
                f"{self._key.removesuffix('image_roots')}modality: text",
            )
        relative, own_root = self._below_a_root(path)
        name = picture_name(relative)
        if isinstance(name, Unusable):
            return name
        match = self._find(name, own_root)
        if isinstance(match, Unusable):
            return match
        if own_root and match != self._find(name):
            return Unusable("name_conflict", f"an earlier root has another file {name!r}")
        if conflict := self._conflict(_parent(name)):
            return Unusable("name_conflict", f"{conflict!r} is a file in one root and a folder in another")
        return Located(name, *match)

    def _below_a_root(self, path: str) -> tuple[str, str | None]:
        """Return an absolute path as a path below the first root that has it, and this root.

        Any other path is returned as it is, with None.
        """
        if not path.startswith("/"):
            return path, None
        absolute = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
        for written, root in zip(self._written, self._roots, strict=True):
            for folder in (written, root):
                if absolute.startswith(inside := os.path.join(folder, "")):
                    return absolute.removeprefix(inside), root
        return path, None

    def _find(self, name: str, root: str | None = None) -> tuple[str, str | None] | Unusable:
        """Return the file of a name, and what differs. root: the only one to look in; None for all."""
        roots = [root] if root else self._roots
        for differs in (None, *FOLDS):
            look = partial(self._alike, differs) if differs else self._exact
            if file := self._first(look, spellings(name), roots):
                return file if isinstance(file, Unusable) else (file, differs)
        return Unusable("missing", "no root has a file of this path")

    def _first(
        self, look: Callable[[str, str], str | Unusable | None], names: Sequence[str], roots: Sequence[str]
    ) -> str | Unusable | None:
        """Return the first file that `look` finds, or else the first refusal."""
        refused: Unusable | None = None
        for name in names:
            for root in roots:
                result = look(root, name)
                if isinstance(result, str) or (result and result.reason == "ambiguous"):
                    return result
                refused = refused or result
        return refused

    def _exact(self, root: str, name: str) -> str | Unusable | None:
        parent, _, last = name.rpartition("/")
        folder = self._folder(root, parent)
        return self._file(folder, last) if isinstance(folder, str) else folder

    def _alike(self, differs: str, root: str, name: str) -> str | Unusable | None:
        parent, _, last = name.rpartition("/")
        entries = [
            (folder, entry)
            for folder in self._folders_like(differs, root, parent)
            for entry in self._listing(folder)[differs].get(FOLDS[differs](last), ())
        ]
        # The usual case of a picture that is not here yet, for each of its spellings.
        if not entries:
            return None
        pairs = [(os.path.join(folder, entry), self._file(folder, entry)) for folder, entry in entries]
        files = {file: path for path, file in pairs if isinstance(file, str)}
        if len(files) > 1:
            names = sorted(os.path.relpath(path, root) for path in files.values())
            shown = ", ".join(map(ascii, names[:NAMED])) + (f" and {len(names) - NAMED} more" if names[NAMED:] else "")
            return Unusable("ambiguous", f"files that differ from it only in {differs}: {shown}")
        return next(iter(files)) if files else next((refused for _, refused in pairs if refused), None)

    def _find_folder(self, root: str, name: str) -> str | Unusable | None:
        """Return the real path of a folder below a root; None if it does not exist."""
        if not name:
            return root
        parent, _, last = name.rpartition("/")
        above = self._folder(root, parent)
        entry = self._look(above, last) if isinstance(above, str) else above
        if not isinstance(entry, tuple):
            return entry
        return entry[0] if stat.S_ISDIR(entry[1]) else None

    def _find_folders_like(self, differs: str, root: str, name: str) -> list[str]:
        if not name:
            return [root]
        above = self._folders_like(differs, root, _parent(name))
        last = FOLDS[differs](name.rpartition("/")[2])
        entries = ((folder, entry) for folder in above for entry in self._listing(folder)[differs].get(last, ()))
        folders = (self._folder(folder, entry) for folder, entry in entries)
        return sorted({folder for folder in folders if isinstance(folder, str)})

    def _file(self, folder: str, name: str) -> str | Unusable | None:
        entry = self._look(folder, name)
        if not isinstance(entry, tuple):
            return entry
        file, mode = entry
        return file if stat.S_ISREG(mode) else Unusable("not_a_file", "a folder, a pipe or a device")

    def _look(self, folder: str, name: str) -> tuple[str, int] | Unusable | None:
        """Return the real path and the mode of an entry of a real folder; None if it does not exist."""
        path = os.path.join(folder, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                path = os.path.realpath(path, strict=True)
                if not os.path.join(path, "").startswith(self._inside):
                    return Unusable("path_outside", "a link leads out of the picture roots")
                if not is_text(path):
                    return Unusable("path_invalid", "a link leads to a name that is not Unicode text")
                mode = os.lstat(path).st_mode
        except OSError as error:
            if error.errno in NO_SUCH_NAME:
                return None
            if isinstance(error, PermissionError):
                return Unusable("unreadable", "its folder cannot be searched (permissions)")
            raise _disk_fault(error) from None
        return path, mode

    def _list_folder(self, folder: str) -> dict[str, dict[str, list[str]]]:
        """Return the names in a folder by what may differ, and by what is the same if they differ only in this."""
        listings: dict[str, dict[str, list[str]]] = {differs: {} for differs in FOLDS}
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, PermissionError):
            names = []
        except OSError as error:
            raise _disk_fault(error) from None
        for differs, fold in FOLDS.items():
            for name in names:
                listings[differs].setdefault(fold(name), []).append(name)
        return listings

    def _find_conflict(self, folder: str) -> str | None:
        """Return the part of a folder's name that is itself a picture's name, or None.

        The roots decide, not the names of this split, so that the answer is the same for every split and in every
        order: the splits of a data set share one store.
        """
        if not folder:
            return None
        above = self._conflict(_parent(folder))
        return above or (None if isinstance(self._find(folder), Unusable) else folder)


def read_picture(file: str, max_bytes: int) -> bytes | Unusable:
    """Read the bytes of a picture, at most `max_bytes`.

    Only a regular file is read, even if something else has got its name since it was located. Raises VlmflowError if
    the disk itself fails.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Unusable("not_a_file", "a folder, a pipe or a device")
            if status.st_size > max_bytes:
                return Unusable("too_many_bytes", f"{status.st_size} bytes, the limit is {max_bytes}")
            return opened.read(status.st_size)
    except FileNotFoundError:
        return Unusable("missing", "it was there when the roots were searched, and is now missing")
    except PermissionError:
        return Unusable("unreadable", "the file cannot be read (permissions)")
    except OSError as error:
        error.filename = file
        raise _disk_fault(error) from None


def _disk_fault(error: OSError) -> VlmflowError:
    """Convert an error that does not concern the picture (a disk or network fault)."""
    return PassingError(
        f"{error.filename}: {error.strerror}", "check the disk that holds it, then run the same command again"
    )


def _readable_root(root: str, key: str) -> str:
    try:
        real = os.path.realpath(Path(root).expanduser(), strict=True)
        with os.scandir(real) as entries:
            next(entries, None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise VlmflowError(f"{key}: {root}: {reason}", f"name a folder that can be read: {key}") from None
    if not is_text(real):
        raise VlmflowError(
            f"{key}: {root}: its real path {real!r} is not Unicode text, as manifests require",
            f"rename that folder, or name another: {key}",
        )
    return real


def _parent(name: str) -> str:
    return name.rpartition("/")[0]
