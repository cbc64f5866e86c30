"""Which files of a folder or a repository are a model's: data alone, since other people wrote it.

Taken are weights in safetensors, JSON, the tokenizer's files, chat templates and texts of licences. All else stays
where it is and is named: Python, libraries and pickles can run code, and pages speak of the base model.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.config.source import NOT_IN_PATHS, parse_source
from vlmflow.core.errors import VlmflowError

KINDS = (".safetensors", ".json", ".txt", ".jinja", ".model", ".tiktoken")
"""How the names of a model's files end; the last two are tokenizers of sentencepiece and tiktoken."""

LICENCES = {"LICENSE", "LICENCE", "NOTICE", "COPYING"}
"""Texts that go with the weights wherever these go; also with `.md` behind the name."""

NOT_A_MODELS = {"args.json"}
"""ms-swift's own arguments (`BaseArguments.load_args`): they name Python files that it imports."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The names under which transformers looks for weights: one file, or an index of several."""

ADAPTER = "adapter_config.json"

REFUSED_KEYS = {
    "auto_map": "names Python code that transformers would run",
    "custom_pipelines": "names Python code that transformers would run",
    "transformers_weights": "names other weights than those that the merge uses",
}
"""Keys of JSON files that make a model more than its data, wherever they stand, and what they do."""

MAX_JSON_BYTES = 200_000_000
"""Five times the largest tokenizer.json that is known; a larger file would fill the memory of a small pod."""

NAMED = 20
"""Files that one line of the log names."""

PLAIN_COPY = (
    "use a model that transformers supports without it; or remove it from a local copy of the model and use that"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """The names of a model's files, sorted, and of what lies beside them, as `shown` writes names."""

    names: list[str]
    left_out: list[str]


def sort_names(names: Iterable[str]) -> ModelFiles:
    """Tell a model's files from what lies beside them, by name; what is git's own or a cache's is neither."""
    seen = sorted(name for name in names if not is_housekeeping(name))
    return ModelFiles([name for name in seen if is_taken(name)], [shown(name) for name in seen if not is_taken(name)])


def is_housekeeping(name: str) -> bool:
    """Tell whether a file is not the model's but git's or a cache's: a part of its name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def is_taken(name: str) -> bool:
    """Tell whether a file is of a kind that a model consists of; one whose name no path can have is not."""
    last = name.rsplit("/", 1)[-1]
    kind = last.endswith(KINDS) or last.removesuffix(".md") in LICENCES
    return kind and name not in NOT_A_MODELS and name.isprintable() and not NOT_IN_PATHS.search(name)


def shown(name: str) -> str:
    """Write a name so that it stays in its line, whatever characters it has."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def log_left_out(what: str, left_out: list[str]) -> None:
    """Name the files beside a model's in the log; the manifest and provenance.json name all of them."""
    if left_out:
        more = f", and {len(left_out) - NAMED:,} more" if len(left_out) > NAMED else ""
        logger.info("%s: left out, because it is not model data: %s%s", what, ", ".join(left_out[:NAMED]), more)


def list_files(folder: Path, what: str) -> ModelFiles:
    """Give the files of a local model by name relative to its folder.

    A link counts as the file to which it leads where that lies in the folder itself, or among the blobs of the same
    repository in the hub's cache (`models--OWNER--NAME/snapshots/COMMIT`, whose files are links).
    what: names the folder to people ("models.qwen3.source").

    Raises VlmflowError where there is no such folder, no weights in it, or among its files a link that leads elsewhere.
    """
    if not folder.is_dir():
        raise VlmflowError(f"{what}: no folder {folder}", "name the folder with the model's files")
    places = [
        Path(place, name)
        for place, folders, names in os.walk(folder)
        for name in [*names, *(name for name in folders if os.path.islink(os.path.join(place, name)))]
    ]
    files = sort_names(str(place.relative_to(folder)) for place in places)
    for name in files.names:
        _refuse_elsewhere(folder, name)
    require_weights(files, f"{what}: {folder}")
    return files


def _refuse_elsewhere(folder: Path, name: str) -> None:
    """Refuse what is no file of the folder: its bytes would be merged, and published."""
    file, real = folder / name, Path(os.path.realpath(folder / name))  # resolve() raises for a link to itself
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in homes):
        raise VlmflowError(
            f"{file}: leads outside the model's folder, to {shown(str(real))}",
            f"copy the folder without links (cp --dereference --recursive {folder} COPY), and use COPY as the source",
        )
    if not real.is_file():
        raise VlmflowError(f"{file}: is not a file", "remove it from the folder, or replace it by the file")


def require_weights(files: ModelFiles, what: str) -> None:
    """Refuse a model without safetensors, which every stage reads.

    Raises VlmflowError that names the weights in other forms.
    """
    if not any(name.endswith(".safetensors") for name in files.names):
        others = [name for name in files.left_out if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5"))]
        raise VlmflowError(
            f"{what} has no safetensors weights" + (f", but {', '.join(others)}" if others else ""),
            "use a model in safetensors form, or convert it with transformers' save_pretrained",
        )


def local_files(source: str, what: str) -> list[str]:
    """Give the paths of the files of a model that lies in a local folder; none where it is on the hub.

    Raises VlmflowError as `list_files` and `refuse_code`.
    """
    folder = parse_source(source)
    if not isinstance(folder, Path):
        return []
    names = list_files(folder, what).names
    refuse_code(folder, names)
    return [str(folder / name) for name in names]


def refuse_code(folder: Path, names: list[str]) -> None:
    """Refuse a model whose JSON files name code, other weights, or shards that lie elsewhere.

    names: its files, of which those in JSON must be there.

    Raises VlmflowError that names file, key and value.
    """
    if ADAPTER in names:
        raise VlmflowError(
            f"{folder / ADAPTER}: the model's folder contains an adapter, which transformers would load",
            "merge it into the weights first (peft's merge_and_unload), or use a local copy of the model without it",
        )
    for name in names:
        if name.endswith(".json"):
            _refuse_keys(folder / name)
    if INDEX in names:
        _refuse_shards(folder / INDEX, set(names))
    pickles = [name for name in names if name.endswith(".bin.index.json")]
    if pickles and not {SINGLE, INDEX} & set(names):
        raise VlmflowError(
            f"{folder / pickles[0]}: the weights are pickles; {SINGLE} and {INDEX} are missing",
            "use a model in safetensors form, or convert it with transformers' save_pretrained",
        )


def _refuse_keys(file: Path) -> None:
    found: list[tuple[str, Any]] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # A number is a token's in a vocabulary; null and {} name nothing.
        found.extend((key, value) for key, value in pairs if key in REFUSED_KEYS and value and type(value) is not int)
        return dict(pairs)

    _read(file, look)
    for key, value in found:
        told = json.dumps(value)
        raise VlmflowError(
            f"{file}: {key} = {told[:200]}{'…' if len(told) > 200 else ''}: {REFUSED_KEYS[key]}",
            PLAIN_COPY,
        )


def _refuse_shards(index: Path, names: set[str]) -> None:
    content = _read(index, dict)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not weight_map or not isinstance(weight_map, dict):
        raise VlmflowError(f"{index}: has no weight_map", "use a complete revision of the model")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or ".." in shard:
            raise VlmflowError(
                f"{index}: weight_map: {shown(tensor)} = {json.dumps(shard)}: a shard must be in the model's own "
                "folder",
                "use a revision that contains its own shards; do not use one that points to other files",
            )
        if not shard.endswith(".safetensors") and shard in names:
            raise VlmflowError(
                f"{index}: weight_map: {shown(tensor)} = {json.dumps(shard)}: a shard must be a safetensors file",
                "use a revision that contains its own shards; do not use one that points to other files",
            )
        if shard not in names:
            raise VlmflowError(
                f"{index}: weight_map: {shown(tensor)} = {json.dumps(shard)}, which is missing",
                "use a complete revision of the model",
            )


def _read(file: Path, look: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Parse a JSON file, every object's pairs through `look`; raises VlmflowError where it is none, or too large."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise VlmflowError(f"{file}: {size:,} bytes of JSON; the limit is {MAX_JSON_BYTES:,}", PLAIN_COPY)
    try:
        return json.loads(file.read_bytes(), object_pairs_hook=look)
    except (ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: is not readable JSON: {error}", PLAIN_COPY) from None
