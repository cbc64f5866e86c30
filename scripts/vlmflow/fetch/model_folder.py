"""A folder with a model's files, and the manifest that describes it to the stages that read it."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from vlmflow.config.settings import Settings
from vlmflow.config.source import parse_source
from vlmflow.errors import VlmflowError
from vlmflow.files import read_json, sha256_of, write_json
from vlmflow.progress import Progress

MANIFEST = "manifest.json"


class FileRecord(Settings):
    """One file of a model."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class ModelManifest(Settings):
    """What `models/NAME/manifest.json` says.

    The folder is named directly, where the bytes are: a link in between could be turned to other bytes.
    """

    name: str
    """The name in the configuration."""

    source: str
    """The address or path as the configuration gives it."""

    revision: str | None
    """The commit on the hub; None for a local folder."""

    folder: Path
    """The absolute path of the folder that holds the bytes; nothing writes there."""

    files: dict[str, FileRecord]
    """By name relative to the folder."""

    digest: str
    """What `digest_of` gives of the files: equal for equal models, wherever they lie."""


def digest_of(files: Mapping[str, FileRecord]) -> str:
    """Give the SHA-256 over the sorted list of pairs [name, sha256], written as JSON without spaces."""
    pairs = sorted([name, record.sha256] for name, record in files.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def write_manifest(
    model: Path, name: str, source: str, revision: str | None, folder: Path, files: Mapping[str, FileRecord]
) -> None:
    """Write a manifest into the folder `model`; the rest is what its fields say."""
    manifest = ModelManifest(
        name=name,
        source=source,
        revision=revision,
        folder=folder.resolve(),
        files=dict(sorted(files.items())),
        digest=digest_of(files),
    )
    write_json(model / MANIFEST, manifest.model_dump(mode="json"))


def read_manifest(model: Path) -> ModelManifest:
    """Read what `fetch_model` left in `models/NAME`.

    Raises VlmflowError where the folder with the bytes is gone, or a file there has another size than it had.
    """
    next_step = f"remove {model} and run the same command again: what is missing is fetched"
    try:
        manifest = ModelManifest.model_validate(read_json(model / MANIFEST))
    except pydantic.ValidationError as error:
        raise VlmflowError(f"{model / MANIFEST}: {error.errors()[0]['msg']}", next_step) from None
    if not manifest.folder.is_dir():
        raise VlmflowError(f"model {manifest.name}: its folder {manifest.folder} is gone", next_step)
    for name, record in manifest.files.items():
        file = manifest.folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != record.bytes:
            state = "is gone" if size is None else f"has {size:,} bytes, not {record.bytes:,} as when it was fetched"
            raise VlmflowError(f"model {manifest.name}: {file} {state}", next_step)
    return manifest


def list_files(folder: Path, what: str) -> list[str]:
    """Give the names of a local model's files, relative to its folder, sorted; links to files count as files.

    what: names the folder to people ("models.qwen3.source").

    Raises VlmflowError where there is no such folder, or no weights in it.
    """
    if not folder.is_dir():
        raise VlmflowError(f"{what}: there is no folder {folder}", "give the folder with the model's files")
    names = [
        os.path.relpath(os.path.join(place, file), folder)
        for place, _, files in os.walk(folder)
        for file in files
        if os.path.isfile(os.path.join(place, file))
    ]
    names = sorted(name for name in names if not is_housekeeping(name))
    require_weights(names, f"{what}: {folder}")
    return names


def local_files(source: str, what: str) -> list[str]:
    """Give the paths of the files of a model that lies in a local folder; none where it is on the hub.

    Raises VlmflowError as `list_files`.
    """
    folder = parse_source(source)
    return [str(folder / name) for name in list_files(folder, what)] if isinstance(folder, Path) else []


def is_housekeeping(name: str) -> bool:
    """Tell whether a file is not the model's but git's or a cache's: a part of its name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def require_weights(names: list[str], what: str) -> None:
    """Refuse a model without safetensors, which every stage reads.

    Raises VlmflowError that names the weights in other forms.
    """
    if not any(name.endswith(".safetensors") for name in names):
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5"))]
        raise VlmflowError(
            f"{what} holds no safetensors weights" + (f", but {', '.join(others)}" if others else ""),
            "use a model in safetensors form, or convert it with transformers' save_pretrained",
        )


def hash_files(folder: Path, names: list[str], threads: int) -> dict[str, FileRecord]:
    """Read all files of a folder, `threads` at a time, and give size and SHA-256 by name.

    Memory does not grow with the files; hashlib lets go of the interpreter's lock, so that threads suffice.
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
