"""What was fetched, in the place where stages read it: raw files, models, and a model's files without its weights.

Raw files are linked from the store, or copied from this machine. A model is a folder of links to its files; the weights
of a finished run (`merged/RUN`) may be one, too: just the files that the run published. A model's other files are a
target of their own: some MB of configuration and tokenizer, all that counting tokens and estimating a training need, so
that neither waits for the weights. Each has an account, by which stages check it.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from vlmflow.core.account import read_account, read_files, refuse_changed, remember, write_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import BUFFER, lies_within, remove, require_free_disk, sha256_of, whole_file, whole_folder
from vlmflow.core.progress import Progress, in_threads
from vlmflow.fetch.model_files import INDEX, SINGLE, is_housekeeping, shown
from vlmflow.raw.damaged_file import not_a_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

VIEWS = "views"
"""The folder of a store with the folders of links that stages see."""

FILES = "files"
"""The folder of the copies of a model's files without weights, beside their manifest."""

WEIGHTS = ".safetensors"

PROVENANCE = "provenance.json"
"""The account of a published run. It is none of the model's files: another licence does not train on other weights."""


def link_or_copy(stored: Path, raw: Path) -> None:
    """Hard-link a file of the store; on different disks, copy it.

    Raises VlmflowError if the copy does not fit on its disk.
    """
    raw.parent.mkdir(parents=True, exist_ok=True)
    remove(raw)
    try:
        os.link(stored, raw)
    except OSError:
        copy(stored, raw)


def copy(source: Path, raw: Path) -> None:
    """Copy a file completely or not at all.

    Raises VlmflowError if it does not exist, is empty, cannot be read, or its copy does not fit on the disk.
    """
    if not source.is_file():
        raise not_a_file(source)
    if not source.stat().st_size:
        raise VlmflowError(f"{source} is empty", "name another data file (config: datasets)")
    require_free_disk(raw.parent, source.stat().st_size, f"a copy of {source}")
    progress = Progress(f"copying {source}", source.stat().st_size, "bytes")
    try:
        with source.open("rb") as original, whole_file(raw) as file, progress:
            while block := original.read(BUFFER):
                file.write(block)
                progress.advance(len(block))
    except OSError as error:
        raise PassingError(
            f"copying {source} to {raw}: {error.strerror}",
            "check that it can be read, and that there is space to write; then run the same command again",
        ) from None


class FileRecord(msgspec.Struct, frozen=True):
    """What an account says of a file: of a raw one in `raw/DATASET/.fetched/FILE.json`. bytes: its size."""

    bytes: int
    sha256: str


def write_raw_account(raw: Path, account: Path) -> None:
    """Write the account of a raw file, for the stages that read it."""
    began = time.time_ns()
    files = read_files(f"reading {raw}", "files", raw.parent, [raw.name])
    read = files[raw.name]
    logger.info("%s: %d bytes, sha256 %s", raw, read.size, read.sha256)
    write_account(account, FileRecord(read.size, read.sha256))
    remember(_record(raw), files, began)


def refuse_changed_raw(raw: Sequence[Path], accounts: Sequence[Path]) -> None:
    """Refuse raw files of a data set that have changed since they were fetched.

    accounts: the files that `write_raw_account` wrote for each of them; [] skips the check.

    Raises VlmflowError with the names of the files.
    """
    for file, account in zip(raw, accounts, strict=True) if accounts else ():
        next_step = f"remove {file} and run the same command again: the workflow fetches it again"
        recorded = read_account(account, FileRecord).sha256
        refuse_changed("raw files", file.parent, {file.name: recorded}, _record(file), next_step)


def _record(raw: Path) -> str:
    return f"raw/{raw.parent.name}"


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
    store: Path, model: str, folder: Path, files: Mapping[str, FileRecord], own: Mapping[str, bytes], *, of_target: bool
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


Manifest = TypeVar("Manifest")


def read_model_manifest(model: Path) -> ModelManifest:
    """Read the manifest in `models/NAME`, and check the files that it describes.

    Raises VlmflowError if the folder is missing or has other files, or a file has changed.
    """
    manifest, next_step = _read_manifest(model, ModelManifest)
    if not manifest.folder.is_dir():
        raise VlmflowError(f"model {manifest.name}: its folder {manifest.folder} is missing", next_step)
    for name, record in manifest.files.items():
        file = manifest.folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != record.bytes:
            state = "is missing" if size is None else f"has {size:,} bytes; it had {record.bytes:,} when it was fetched"
            raise VlmflowError(f"model {manifest.name}: {file.resolve()} {state}", next_step)
    _refuse_other_files(manifest.folder, manifest.files, f"models/{manifest.name}", next_step)
    return manifest


def _read_manifest(target: Path, form: type[Manifest]) -> tuple[Manifest, str]:
    """Return the manifest in a target's folder, and what to do if it does not describe the files."""
    next_step = f"remove {target} and run the same command again: the workflow fetches what is missing"
    try:
        return read_account(target / MANIFEST, form), next_step
    except VlmflowError as error:
        raise VlmflowError(error.cause, next_step) from None


def _refuse_other_files(folder: Path, files: Mapping[str, FileRecord], record: str, next_step: str) -> None:
    """Refuse files of a model that a manifest does not name, or that have changed. record: see `refuse_changed`."""
    if others := file_names(folder) - files.keys():
        raise VlmflowError(
            f"{record}: {folder} holds {shown(min(others))}, which vlmflow did not put there",
            f"remove it, because transformers and ms-swift would read it; or {next_step}",
        )
    digests = {name: file.sha256 for name, file in files.items()}
    refuse_changed("model files", folder, digests, record, next_step)


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
    names = (os.path.relpath(os.path.join(path, name), folder) for path, _, files in os.walk(folder) for name in files)
    return {name for name in names if not is_housekeeping(name)}


def hash_files(folder: Path, names: list[str], threads: int) -> dict[str, FileRecord]:
    """Read all files of a folder, `threads` at a time, and return size and SHA-256 by name.

    Memory does not grow with the files; hashlib releases the interpreter's lock, so threads suffice.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    records: dict[str, FileRecord] = {}
    with Progress(f"reading {folder.name}", sum(sizes.values()), "bytes") as progress:

        def read(name: str) -> None:
            records[name] = FileRecord(bytes=sizes[name], sha256=sha256_of(folder / name))
            progress.advance(sizes[name])

        in_threads(sorted(names, key=lambda name: -sizes[name]), read, threads)
    return records


class _Record(msgspec.Struct, frozen=True):
    """The used part of it (reports/provenance, Provenance)."""

    merged: dict[str, str]


def published_files(merged: Path, threads: int) -> dict[str, FileRecord]:
    """Return size and SHA-256 of the files that a run published, by name. threads: files that are read at a time.

    Raises VlmflowError if its provenance is missing or damaged, or with the names of files that are missing or have
    changed.
    """
    recorded = read_account(merged / PROVENANCE, _Record).merged
    if unsafe := [name for name in recorded if not lies_within(name)]:
        raise VlmflowError(
            f"{merged / PROVENANCE}: {unsafe[0]!r} is no name inside a folder",
            f"remove {merged} and run the same command again",
        )
    files = hash_files(merged, [name for name in recorded if (merged / name).is_file()], threads)
    if other := sorted(name for name in recorded if name not in files or files[name].sha256 != recorded[name]):
        raise VlmflowError(
            f"{merged}: {len(other)} files differ from those that {PROVENANCE} names: {', '.join(other[:5])}",
            f"remove {merged} and run the same command again: it is made again from the proven files",
        )
    return files


class SmallFiles(msgspec.Struct, frozen=True):
    """The content of `model_files/NAME/manifest.json`.

    source: the address or path in the configuration. revision: the commit on the hub; null for a local folder.
    files: size and SHA-256 by name relative to the folder of the copies. tensors: the names of those in the weights;
    null if the weights are not there.
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
    manifest, next_step = _read_manifest(target, SmallFiles)
    folder = (target / FILES).absolute()
    _refuse_other_files(folder, manifest.files, f"model_files/{target.name}", next_step)
    return folder


def tensors_of(target: Path) -> list[str] | None:
    """Return the names of the tensors of the model in `model_files/NAME`; None if they are not known."""
    return read_account(target / MANIFEST, SmallFiles).tensors
