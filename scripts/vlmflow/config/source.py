"""Where a file or a model comes from: an address on the hub, or a path on this machine."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmflow.errors import VlmflowError

HUB_FORMS = "hf://datasets/OWNER/NAME/FILE, hf://OWNER/NAME (a model), file:///PATH, or a path"


@dataclass(frozen=True)
class HubSource:
    """Something on the Hugging Face hub, without its revision: that one is pinned in `pins.yaml`.

    repo_type: "dataset" or "model".
    repo: "OWNER/NAME".
    path: the file inside a data set; None for a whole model.
    """

    repo_type: str
    repo: str
    path: str | None

    def __str__(self) -> str:
        return f"hf://{'datasets/' if self.repo_type == 'dataset' else ''}{self.repo}" + (
            f"/{self.path}" if self.path else ""
        )

    @property
    def name(self) -> str:
        """The last part of the address: a file's name, or a model's."""
        return (self.path or self.repo).rsplit("/", 1)[-1]


def parse_source(text: str) -> HubSource | Path:
    """Read an address in the form that huggingface_hub's file system uses, or a local path.

    Raises VlmflowError for any other form.
    """
    if text.startswith("hf://"):
        parts = text.removeprefix("hf://").split("/")
        if any(part in ("", ".", "..") or "@" in part for part in parts):
            raise _unreadable(text)
        if parts[0] == "datasets" and len(parts) >= 4:
            return HubSource("dataset", "/".join(parts[1:3]), "/".join(parts[3:]))
        if parts[0] != "datasets" and len(parts) == 2:
            return HubSource("model", "/".join(parts), None)
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
    except RuntimeError:  # ~NAME of nobody
        raise _unreadable(text) from None


def _unreadable(text: str) -> VlmflowError:
    return VlmflowError(
        f"{text!r} is no known form of address", f"use {HUB_FORMS}; revisions stand in pins.yaml, not here"
    )
