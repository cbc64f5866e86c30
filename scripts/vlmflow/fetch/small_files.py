"""A model's files other than its weights, as a target of their own: some MB of configuration and tokenizer.

They are all that counting tokens and estimating a training need, so that neither waits for the weights.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.core.integrity import refuse_changed
from vlmflow.fetch.model_files import INDEX, SINGLE, shown
from vlmflow.fetch.model_folder import MANIFEST, FileRecord, file_names

FILES = "files"
"""The folder of the copies, beside the manifest."""

WEIGHTS = ".safetensors"


class SmallFiles(msgspec.Struct, frozen=True):
    """The content of `model_files/NAME/manifest.json`.

    source: the address or path in the configuration. revision: the commit on the hub; null for a local folder.
    files: size and SHA-256 by name relative to the folder of the copies. tensors: the names of those in the weights;
    null if the weights are not there, and in a manifest of before.
    """

    source: str
    revision: str | None
    files: dict[str, FileRecord]
    tensors: list[str] | None = None


def small_names(names: Iterable[str]) -> list[str]:
    """Return the names of a model's files without weights."""
    return [name for name in names if not name.endswith(WEIGHTS)]


def naming_files(names: list[str]) -> list[str]:
    """Return the same with the weights, if they are one file: no index names its tensors."""
    return [name for name in names if not name.endswith(WEIGHTS) or (name == SINGLE and INDEX not in names)]


def write_small_files(
    target: Path,
    folder: Path,
    names: Iterable[str],
    source: str,
    revision: str | None,
    tensors: list[str] | None = None,
    own: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Copy files of a model from `folder` into `target`, with their manifest.

    names: relative to the folder. source, revision, tensors: see `SmallFiles`. own: files in place of the model's,
    such as `chat_templates.own_files`.
    """
    files = {}
    for name in sorted({*names, *own}):
        copy = target / FILES / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in own:
            copy.write_bytes(own[name])
        else:
            shutil.copyfile(folder / name, copy)
        files[name] = FileRecord(copy.stat().st_size, sha256_of(copy))
    write_account(target / MANIFEST, SmallFiles(source, revision, files, tensors))


def read_small_files(target: Path) -> Path:
    """Check the files in `model_files/NAME`, and return the folder of the copies.

    Raises VlmflowError if a file is missing, has changed, or is not in the manifest.
    """
    next_step = f"remove {target} and run the same command again: the workflow fetches what is missing"
    try:
        manifest = read_account(target / MANIFEST, SmallFiles)
    except VlmflowError as error:
        raise VlmflowError(error.cause, next_step) from None
    folder = (target / FILES).absolute()
    digests = {name: record.sha256 for name, record in manifest.files.items()}
    refuse_changed("model files", folder, digests, f"model_files/{target.name}", next_step)
    if others := file_names(folder) - digests.keys():
        raise VlmflowError(f"{folder} holds {shown(min(others))}, which vlmflow did not put there", next_step)
    return folder


def tensors_of(target: Path) -> list[str] | None:
    """Return the names of the tensors of the model in `model_files/NAME`; None if they are not known."""
    return read_account(target / MANIFEST, SmallFiles).tensors
