"""Fetches pinned data files and models from the hub into the stores."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vlmflow.config.source import HubSource
from vlmflow.config.tables import Pin
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, sha256_of, unfinished, write_json
from vlmflow.core.patience import patiently
from vlmflow.core.progress import Progress, in_threads
from vlmflow.fetch import hub
from vlmflow.fetch.download import download
from vlmflow.fetch.hub import HubFile
from vlmflow.fetch.model_files import INDEX, SINGLE, refuse_code, require_weights, sort_names
from vlmflow.fetch.model_weights import read_names, tensor_names
from vlmflow.fetch.placed import FileRecord, digest_of, hash_files, small_names
from vlmflow.fetch.remote_file import RemoteFile
from vlmflow.fetch.transport import CHECK_PROXIES, Refused, Transport

LEFT_OUT = ".left-out.json"
"""Beside a model's files in the store: the names of the repository's other files, which are not fetched."""

logger = logging.getLogger(__name__)


def store_folder(store: Path, source: HubSource, revision: str) -> Path:
    """Return the folder of a store for a repository at a commit."""
    return store / f"{source.repo.replace('/', '--')}@{revision}"


def fetch_data_file(source: HubSource, pin: Pin | None, store: Path) -> Path:
    """Fetch a data file into the store and return its path there; needs no network if it is already there.

    pin: its row in pins.yaml, whose size and digest must match the hub's.

    Raises VlmflowError.
    """
    path, (pin, revision) = source.path, pinned(source, pin)
    assert path is not None, f"{source} is a model, and no file"
    target = store_folder(store, source, revision) / path
    if target.is_file() and pin.size in (None, target.stat().st_size) and pin.sha256 in (None, sha256_of(target)):
        logger.info("%s: already in the store, %s", source, target)
        return target
    file, _ = patiently(str(source), lambda: hub.look_up(source, revision, path))
    require_pinned(source, pin, size=file.size, sha256=file.sha256)
    received = bring({target: file}, f"fetching {source.name}", threads=1)
    require_pinned(source, pin, sha256=received[target])
    return target


def fetch_model(
    source: HubSource, pin: Pin | None, store: Path, threads: int, *, dequantize: bool = False
) -> tuple[Path, dict[str, FileRecord], list[str]]:
    """Fetch a model's files into the store; returns its folder, size and SHA-256 by file name, and the other files.

    pin: its row in pins.yaml. If the store has exactly the files of its size and digest, the network is not used.
    threads: files at a time. dequantize: whether the model must be quantised, in FP8.

    Raises VlmflowError; refuses unsafe JSON files before it fetches the weights.
    """
    pin, revision = pinned(source, pin)
    folder = store_folder(store, source, revision)
    if (records := _complete_in_store(folder, pin, threads)) is not None:
        logger.info("%s: already in the store, %s", source, folder)
        refuse_code(folder, list(records), source=str(source), dequantize=dequantize)
        left_out = read_account(folder / LEFT_OUT, list[str]) if (folder / LEFT_OUT).is_file() else []
        return folder, records, left_out
    hub_files, left_out = model_files(source, revision)
    require_pinned(source, pin, size=sum(file.size for file in hub_files))
    files = {folder / file.path: file for file in hub_files}
    first = {target: file for target, file in files.items() if file.path.endswith(".json")}
    rest = {target: file for target, file in files.items() if target not in first}
    received = bring(first, f"fetching {source.name}, JSON files", threads) if first else {}
    refuse_code(folder, [file.path for file in hub_files], source=str(source), dequantize=dequantize)
    received |= bring(rest, f"fetching {source.name}", threads)
    records = {file.path: FileRecord(bytes=file.size, sha256=received[target]) for target, file in files.items()}
    require_pinned(source, pin, sha256=digest_of(records))
    write_json(folder / LEFT_OUT, left_out)
    return folder, records, left_out


def fetch_small_files(
    source: HubSource, pin: Pin | None, store: Path, threads: int, *, dequantize: bool = False
) -> tuple[Path, list[str], list[str] | None]:
    """Fetch a model's files other than its weights into the store.

    Returns its folder there, the names of all files, and those of its tensors; None if nothing names them.

    pin: its row in pins.yaml. If all files of the model are in the store, the network is not used. threads: files at a
    time. dequantize: whether the model must be quantised, in FP8.

    Raises VlmflowError; refuses unsafe JSON files.
    """
    _, revision = pinned(source, pin)
    folder = store_folder(store, source, revision)
    single: HubFile | None = None
    if (folder / LEFT_OUT).is_file():  # `fetch_model` wrote it at its end
        names = sort_names(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()).names
    else:
        hub_files, _ = model_files(source, revision)
        names = [file.path for file in hub_files]
        single = next((file for file in hub_files if file.path == SINGLE), None)
        small = set(small_names(names))
        to_fetch = {folder / file.path: file for file in hub_files if file.path in small}
        bring(to_fetch, f"fetching {source.name}", threads)
    refuse_code(folder, names, source=str(source), dequantize=dequantize)
    return folder, names, _names_in_header(single) if single and INDEX not in names else tensor_names(folder, names)


def _names_in_header(file: HubFile) -> list[str]:
    """Return the names of the tensors in weights on the hub, of which only the header is fetched."""
    with Progress(f"reading the header of {file}", 0, "bytes") as progress:
        find = partial(hub.address_of, file)
        remote = RemoteFile(str(file), find, Transport(progress), file.size, file.revision)
        try:
            remote.open()
            return read_names(remote.read, file.size, str(file))
        except Refused as refusal:
            raise VlmflowError(f"{file}: {refusal}", CHECK_PROXIES) from None


def model_files(source: HubSource, revision: str | None) -> tuple[list[HubFile], list[str]]:
    """Return the hub's files of a model, and the names of those that are not the model's data.

    Raises VlmflowError, also if none of them is a safetensors file.
    """
    _, files = hub.describe(source, revision)
    sorted_names = sort_names(file.path for file in files)
    require_weights(sorted_names, str(source))
    taken = set(sorted_names.names)
    return [file for file in files if file.path in taken], sorted_names.left_out


def bring(files: Mapping[Path, HubFile], label: str, threads: int) -> dict[Path, str]:
    """Download files, `threads` at a time, and return the SHA-256 of each; existing files are checked.

    label: the work, for people.

    Raises VlmflowError. The first failure stops all other downloads; the next call resumes them.
    """
    total = sum(file.size for file in files.values())
    present = sum(min(file.size, _size(target) or _size(unfinished(target))) for target, file in files.items())
    require_free_disk(next(iter(files)).parent, total - present, label)
    digests: dict[Path, str] = {}
    with Progress(label, total, "bytes") as progress:
        progress.start_at(present)
        transport = Transport(progress)

        def receive(target: Path) -> None:
            digests[target] = download(files[target], target, transport)

        in_threads(sorted(files, key=lambda target: -files[target].size), receive, threads, transport.stop)
    return digests


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _complete_in_store(folder: Path, pin: Pin, threads: int) -> dict[str, FileRecord] | None:
    """Return the records of a folder that matches the pin; None if it does not, or the pin is incomplete."""
    present = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = sort_names(present).names  # earlier fetches brought other files too
    if None in (pin.size, pin.sha256) or sum(_size(folder / name) for name in names) != pin.size:
        return None
    records = hash_files(folder, names, threads)
    return records if digest_of(records) == pin.sha256 else None


def pinned(source: HubSource, pin: Pin | None) -> tuple[Pin, str]:
    """Return the pin of a source on the hub, and its commit; raises VlmflowError if pins.yaml does not have them."""
    if pin is None:
        raise VlmflowError(
            f"{source} is not in pins.yaml",
            f"add a line '{source}:' there, run `vlmflow pins`, review the result and run the same command again; or "
            "put the commit in the address (config: …/NAME@COMMIT)",
        )
    if pin.revision is None:
        raise VlmflowError(
            f"pins.yaml: {source} has no revision",
            "run `vlmflow pins`, review the table and run the same command again",
        )
    return pin, pin.revision


def require_pinned(source: HubSource, pin: Pin, **of_hub: int | str | None) -> None:
    """Compare values of the hub with the pin, if both are known; raises VlmflowError."""
    for key, value in of_hub.items():
        pinned = getattr(pin, key)
        if None not in (pinned, value) and pinned != value:
            raise VlmflowError(
                f"{source}: {key} is {value} on the hub, {pinned} in pins.yaml",
                "find out why before you use it; to accept the hub's value, empty its three values in pins.yaml "
                "and run `vlmflow pins`",
            )
