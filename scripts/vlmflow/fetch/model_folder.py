"""A model as stages see it: a folder of links to its files, and the manifest that describes them."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import msgspec

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of, whole_folder
from vlmflow.core.integrity import refuse_changed
from vlmflow.core.progress import Progress
from vlmflow.fetch.from_disk import link_or_copy
from vlmflow.fetch.model_files import is_housekeeping, shown

MANIFEST = "manifest.json"

VIEWS = "views"
"""The folder of a store with the folders of links that stages see."""


class FileRecord(msgspec.Struct, frozen=True):
    """What a manifest records of a file. bytes: its size."""

    bytes: int
    sha256: str


class InFp8(msgspec.Struct, frozen=True):
    """The model in FP8 of which a bfloat16 base was made. folder: its absolute path. files: by name relative to it.

    digest: the result of `digest_of` for them, as pins.yaml has it.
    """

    folder: Path
    files: dict[str, FileRecord]
    digest: str


class ModelManifest(msgspec.Struct, frozen=True):
    """The content of `models/NAME/manifest.json`."""

    name: str
    """The name in the configuration."""

    source: str
    """The address or path as in the configuration."""

    revision: str | None
    """The commit on the hub; None for a local folder."""

    folder: Path
    """The absolute path of the folder that stages read: `link_files` made it, only with these files."""

    files: dict[str, FileRecord]
    """By name relative to the folder."""

    left_out: list[str]
    """Other files of the model's source, which are not model data."""

    digest: str
    """The result of `digest_of` for these files: equal for equal models in any place."""

    dequantized_from: InFp8 | msgspec.UnsetType = msgspec.UNSET
    """What is at `source`, if the files are made of it (`models.NAME.dequantize`); left out for any other base."""


def digest_of(files: Mapping[str, FileRecord]) -> str:
    """Return `digest_of_files` of some files."""
    return digest_of_files({name: record.sha256 for name, record in files.items()})


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return the SHA-256 over the sorted list of pairs [name, sha256], written as JSON without spaces.

    files: their SHA-256 by name.
    """
    pairs = sorted([name, digest] for name, digest in files.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def link_files(
    store: Path,
    model: str,
    folder: Path,
    files: Mapping[str, FileRecord],
    own: Mapping[str, bytes] = MappingProxyType({}),
    *,
    of_target: bool = False,
) -> tuple[Path, dict[str, FileRecord]]:
    """Make the folder that stages see, with links only to the files of a model; returns its path and its sorted files.

    store: the folder that keeps models. model: its name in the configuration. folder: the folder of the files.
    own: files in place of the model's (`chat_templates.own_files`).
    of_target: whether that is a target. Its files are hard-linked, or on another disk copied: a target may be replaced
    while a stage reads it, and with object storage it leaves with the pod.

    The name changes with the bytes and with the place, so that the files of a running stage never change.
    """
    folder = folder.resolve()
    written = {name: FileRecord(len(text), hashlib.sha256(text).hexdigest()) for name, text in own.items()}
    seen = dict(sorted({**files, **written}.items()))
    key = hashlib.sha256(json.dumps([str(folder), digest_of(seen)]).encode()).hexdigest()[:16]
    view = store / VIEWS / f"{model}-{key}"
    with whole_folder(view) as part:
        for name in seen:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            if name in own:
                (part / name).write_bytes(own[name])
            elif of_target:
                link_or_copy(folder / name, part / name)
            else:
                (part / name).symlink_to((folder / name).resolve())
    return view.resolve(), seen


def read_model_manifest(model: Path) -> ModelManifest:
    """Read the manifest in `models/NAME`, and check the files that it describes.

    Raises VlmflowError if the folder is missing or has other files, or a file has changed.
    """
    next_step = f"remove {model} and run the same command again: the workflow fetches what is missing"
    try:
        manifest = read_account(model / MANIFEST, ModelManifest)
    except VlmflowError as error:
        raise VlmflowError(error.cause, next_step) from None
    if not manifest.folder.is_dir():
        raise VlmflowError(f"model {manifest.name}: its folder {manifest.folder} is missing", next_step)
    for name, record in manifest.files.items():
        file = manifest.folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != record.bytes:
            state = "is missing" if size is None else f"has {size:,} bytes; it had {record.bytes:,} when it was fetched"
            raise VlmflowError(f"model {manifest.name}: {file.resolve()} {state}", next_step)
    if others := file_names(manifest.folder) - manifest.files.keys():
        raise VlmflowError(
            f"model {manifest.name}: {manifest.folder} holds {shown(min(others))}, which vlmflow did not put there",
            f"remove it, because transformers and ms-swift would read it; or {next_step}",
        )
    digests = {name: record.sha256 for name, record in manifest.files.items()}
    refuse_changed("model files", manifest.folder, digests, f"models/{manifest.name}", next_step)
    return manifest


def model_with(models: Path, digest: str) -> tuple[Path, ModelManifest] | None:
    """Return the model of a digest among those of a working directory (its `models`), with its manifest, unchecked.

    A manifest that cannot be read is not its: another model's must not stand in the way.
    """
    for file in sorted(models.glob(f"*/{MANIFEST}")):
        with suppress(VlmflowError):
            manifest = read_account(file, ModelManifest)
            if manifest.digest == digest:
                return file.parent, manifest
    return None


def file_names(folder: Path) -> set[str]:
    """Return the files in a folder, without those that file systems and desktops put anywhere (.nfs…, .DS_Store)."""
    names = (
        os.path.relpath(os.path.join(place, name), folder) for place, _, files in os.walk(folder) for name in files
    )
    return {name for name in names if not is_housekeeping(name)}


def hash_files(folder: Path, names: list[str], threads: int) -> dict[str, FileRecord]:
    """Read all files of a folder, `threads` at a time, and return size and SHA-256 by name.

    Memory does not grow with the files; hashlib releases the interpreter's lock, so threads suffice.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    with (
        Progress(f"reading {folder.name}", sum(sizes.values()), "bytes") as progress,
        ThreadPoolExecutor(threads) as pool,
    ):
        largest_first = sorted(names, key=lambda name: -sizes[name])
        running = {pool.submit(sha256_of, folder / name): name for name in largest_first}
        records = {}
        for done in as_completed(running):
            name = running[done]
            records[name] = FileRecord(bytes=sizes[name], sha256=done.result())
            progress.advance(sizes[name])
    return records
