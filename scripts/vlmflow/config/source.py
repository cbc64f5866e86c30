"""The sources of files and models: addresses on the hub, and paths on this machine."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmflow.config.settings import is_name
from vlmflow.core.errors import VlmflowError

HUB_FORMS = "hf://datasets/OWNER/NAME/FILE, hf://OWNER/NAME (a model), NAME@COMMIT in both, file:///PATH, or a path"

SHARDS = re.compile(r"\*-of-(0*[1-9]\d*)")
"""What an address of several files has: train-*-of-00004.parquet means train-00000-of-00004.parquet to
train-00003-of-00004.parquet."""

NO_COUNT = re.compile(r"#((?![^#]*\.[A-Za-z])[^#/]*)$")
"""The text after the `#` of an address, if it cannot be the rest of a file's name: it has no folder and no suffix."""

COMMIT = re.compile(r"[0-9a-f]{40}")

NOT_IN_PATHS = re.compile(r"[{}\x00-\x1f\x7f\ud800-\udfff]")
"""What no path may contain: Snakemake takes braces for wildcards, and half of a surrogate pair is not text."""


@dataclass(frozen=True)
class HubSource:
    """A file of a data set, or a model, on the Hugging Face hub.

    repo_type: "dataset" or "model".
    repo: "OWNER/NAME".
    path: the file inside a data set; None for a whole model.
    revision: the commit in the address; None if it has none, and `pins.yaml` pins it.
    """

    repo_type: str
    repo: str
    path: str | None
    revision: str | None = None

    def __str__(self) -> str:
        kind = "datasets/" if self.repo_type == "dataset" else ""
        revision = f"@{self.revision}" if self.revision else ""
        path = f"/{self.path}" if self.path else ""
        return f"hf://{kind}{self.repo}{revision}{path}"

    @property
    def name(self) -> str:
        """The last part of the address: a file's name, or a model's."""
        return (self.path or self.repo).rsplit("/", 1)[-1]


def split_sample(text: str) -> tuple[str, int | None]:
    """Return an address without the `#N` after it, and N, the number of rows to draw; None if there is no `#N`."""
    address, mark, count = text.rpartition("#")
    return (address, int(count)) if mark and count.isdecimal() and int(count) > 0 else (text, None)


def files_of(address: str) -> list[str]:
    """Return the addresses of all files that one address means: `train-*-of-00004.parquet` means four.

    The address has the number of files, so neither the hub nor a disk is needed to find them.
    """
    count = SHARDS.search(address)
    if count is None:
        return [address]
    digits = len(count[1])
    return [SHARDS.sub(f"{number:0{digits}}-of-{count[1]}", address, count=1) for number in range(int(count[1]))]


def refuse_path(path: str, where: str = "") -> None:
    """Raise ValueError for a path or an address that no file may have.

    where: the key, if the error is to name it.
    """
    if match := NOT_IN_PATHS.search(path):
        rule = "a path must not have braces, control characters or lone surrogates"
        raise ValueError(f"{where}{': ' if where else ''}{path!r} holds {match[0]!r}; {rule}")


def parse_source(text: str) -> HubSource | Path:
    """Read an address in the form of huggingface_hub's file system, a file:// address, or a local path.

    Raises VlmflowError for any other form.
    """
    if text.startswith("hf://"):
        address, revision = _without_revision(text)
        parts = address.removeprefix("hf://").split("/")
        if any(part in ("", ".", "..") or "@" in part for part in parts):
            raise _unreadable(text)
        if "*" in text:
            raise VlmflowError(
                f"{text!r}: '*' only works where the number of files is given, as in train-*-of-00004.parquet",
                "write it that way, or name every file",
            )
        if parts[0] == "datasets" and len(parts) >= 4:
            return HubSource("dataset", "/".join(parts[1:3]), "/".join(parts[3:]), revision)
        if parts[0] != "datasets" and len(parts) == 2:
            return HubSource("model", "/".join(parts), None, revision)
        raise _unreadable(text)
    if text.startswith("file://"):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost") or not url.path:
            raise _unreadable(text)
        return Path(unquote(url.path))
    if "://" in text or not text:
        raise _unreadable(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~NAME without such a user
        raise _unreadable(text) from None


def base_run(source: str) -> str | None:
    """Return the run whose weights a model's source names, RUN of `merged/RUN`; None for any other source."""
    folder, _, run = source.partition("/")
    return run if folder == "merged" and is_name(run) else None


def _without_revision(text: str) -> tuple[str, str | None]:
    """Return an address on the hub without the `@COMMIT` after its repository, and the commit, or None.

    Raises VlmflowError if this is not a full commit.
    """
    before, mark, behind = text.partition("@")
    revision, slash, path = behind.partition("/")
    if mark and not COMMIT.fullmatch(revision):
        raise VlmflowError(
            f"{text!r}: {revision!r} after the '@' is not a full commit",
            "write all of its 40 hexadecimal digits (a branch or a tag moves), or leave it out and pin it in pins.yaml",
        )
    return before + slash + path, revision or None


def _unreadable(text: str) -> VlmflowError:
    return VlmflowError(f"{text!r} is not a known form of address", f"use {HUB_FORMS}")
