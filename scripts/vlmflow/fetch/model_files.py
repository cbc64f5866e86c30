"""Selects a model's files from a folder or a repository: only data, since other people wrote it.

These are weights in safetensors, JSON, the tokenizer's files, chat templates and licences. All other files are left out
and named: Python, libraries and pickles can run code, and pages describe the base model. JSON is refused that names
code, or other weights, and config.json if its weights are quantised, unless they become bfloat16.
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.config.model_types import architectures_in, kinds_of, unquantised
from vlmflow.config.source import NOT_IN_PATHS, parse_source
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import LFS, read_json

KINDS = (".safetensors", ".json", ".txt", ".jinja", ".model", ".tiktoken")
"""The suffixes of a model's files; the last two are tokenizers of sentencepiece and tiktoken."""

LICENCES = {"LICENSE", "LICENCE", "NOTICE", "COPYING"}
"""Texts that must accompany the weights; also with the suffix `.md`."""

NOT_A_MODELS = {"args.json"}
"""ms-swift's own arguments (`BaseArguments.load_args`): they name Python files that it imports."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The names under which transformers finds weights: one file, or an index of several."""

CONFIG = "config.json"
ADAPTER = "adapter_config.json"

CODE = "names Python code that transformers would run"

REFUSED_KEYS = {
    "auto_map": CODE,
    "custom_pipelines": CODE,
    "transformers_weights": "names other weights than those that the merge uses",
}
"""Refused keys of JSON files, at any depth, and what they do."""

MOST_COUNTED = 10_000_000
"""More than any token's number, and than any classifier has classes."""

MAX_JSON_BYTES = 200_000_000
"""Five times the largest known tokenizer.json; a larger file would fill the memory of a small pod."""

MOST_SHOWN = 200
"""The most characters of a value that a message shows."""

NAMED = 20
"""The most files that one line of the log names."""

PLAIN_COPY = (
    "use a model that transformers supports without it; or remove it from a local copy of the model and use that"
)

FETCH_AGAIN = (
    "choose a complete model: another commit in models.NAME.source (hf://…@COMMIT) or pins.yaml, or a whole folder"
)

KEY, TEXT = "quantization_config", "text_config"
"""The key that describes the quantisation, and the one part of config.json that may have it, too."""

METHOD = "fp8"
"""The one method whose weights can become bfloat16: E4M3, with a scale for each block or matrix (transformers'
FineGrainedFP8Config)."""

BLOCK = (128, 128)
"""Rows and columns of a block where config.json is silent, as in transformers (5.19)."""

PUBLISHED = "use the files that the model's owner published"

MOST_TEXT_BYTES = 1_000_000
"""Of a chat template: some 20 times the largest known one. A larger file would fill the memory."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """The names of a model's files, sorted, and of the files beside them, as `shown` writes names."""

    names: list[str]
    left_out: list[str]


def sort_names(names: Iterable[str]) -> ModelFiles:
    """Separate a model's files from other files by name; files of git or a cache are in neither list."""
    seen = sorted(name for name in names if not is_housekeeping(name))
    return ModelFiles([name for name in seen if is_taken(name)], [shown(name) for name in seen if not is_taken(name)])


def is_housekeeping(name: str) -> bool:
    """Return whether a file belongs to git or a cache: a part of its name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def is_taken(name: str) -> bool:
    """Return whether a file is of a kind that belongs to a model and has a safe name."""
    last = name.rsplit("/", 1)[-1]
    kind = last.endswith(KINDS) or last.removesuffix(".md") in LICENCES
    return kind and name not in NOT_A_MODELS and name.isprintable() and not NOT_IN_PATHS.search(name)


def shown(name: str) -> str:
    """Return a name in printable characters."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def log_left_out(label: str, left_out: list[str]) -> None:
    """Log the first of the files beside a model's; the manifest and provenance.json name all of them."""
    if left_out:
        more = f", and {len(left_out) - NAMED:,} more" if len(left_out) > NAMED else ""
        logger.info("%s: left out, because it is not model data: %s%s", label, ", ".join(left_out[:NAMED]), more)


MOST_OF_POINTER = 1_000
"""Bytes of a pointer of Git LFS."""


def list_files(folder: Path, label: str, *, weights: bool = True) -> ModelFiles:
    """Return the files of a local model by name relative to its folder.

    Links are followed within the folder itself, and to the blobs of the same repository in the hub's cache
    (`models--OWNER--NAME/snapshots/COMMIT`, whose files are links).
    label: the folder's name for people ("models.qwen3.source"). weights: whether it must have some.

    Raises VlmflowError if the folder does not exist or has no weights, or if a link leads elsewhere.
    """
    if not folder.is_dir():
        raise VlmflowError(f"{label}: no folder {folder}", "name the folder with the model's files")
    places = [
        Path(parent, name)
        for parent, folders, names in os.walk(folder)
        for name in [*names, *(name for name in folders if os.path.islink(os.path.join(parent, name)))]
    ]
    files = sort_names(str(path.relative_to(folder)) for path in places)
    for name in files.names:
        _refuse_elsewhere(folder, name)
    if weights:
        require_weights(files, f"{label}: {folder}")
    return files


def _refuse_elsewhere(folder: Path, name: str) -> None:
    """Refuse a file outside of the folder: its bytes would be merged and published."""
    # `resolve` raises for a link to itself.
    file, real = folder / name, Path(os.path.realpath(folder / name))
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(root) for root in homes):
        raise VlmflowError(
            f"{file}: leads outside the model's folder, to {shown(str(real))}",
            f"copy the folder without links (cp --dereference --recursive {folder} COPY), and use COPY as the source",
        )
    if not real.is_file():
        raise VlmflowError(f"{file}: is not a file", "remove it from the folder, or replace it by the file")
    if real.stat().st_size < MOST_OF_POINTER:
        with real.open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                raise VlmflowError(f"{file}: is a pointer of Git LFS, not the file", "fetch the files: git lfs pull")


def require_weights(files: ModelFiles, label: str) -> None:
    """Refuse a model without safetensors, which every stage reads.

    Raises VlmflowError with the names of weights in other forms.
    """
    if not any(name.endswith(".safetensors") for name in files.names):
        others = [name for name in files.left_out if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5"))]
        raise VlmflowError(
            f"{label} has no safetensors weights" + (f", but {', '.join(others)}" if others else ""),
            "use a model in safetensors form, or convert it with transformers' save_pretrained",
        )


def local_files(source: str, label: str, *, weights: bool = True, dequantize: bool = False) -> list[str]:
    """Return the paths of the files of a model in a local folder; [] if it is on the hub.

    weights: see `list_files`. dequantize: see `refuse_code`.

    Raises VlmflowError as `list_files` and `refuse_code` do.
    """
    folder = parse_source(source)
    if not isinstance(folder, Path):
        return []
    names = list_files(folder, label, weights=weights).names
    refuse_code(folder, names, weights=weights, dequantize=dequantize)
    return [str(folder / name) for name in names]


def refuse_code(
    folder: Path, names: list[str], *, source: str = "", weights: bool = True, dequantize: bool = False
) -> None:
    """Refuse a model with an adapter, with pickles only, quantised, or with JSON that names code or other weights.

    names: its files; those in JSON must exist. source: its address, if that is not the folder. weights: whether the
    shards that the index names must be among them. dequantize: whether it must be quantised, in FP8
    (`models.NAME.dequantize`).

    Raises VlmflowError with file, key and value.
    """
    if ADAPTER in names:
        raise VlmflowError(
            f"{folder / ADAPTER}: the model's folder contains an adapter, which transformers would load",
            "merge it into the weights first (peft's merge_and_unload), or use a local copy of the model without it",
        )
    for name in names:
        if name.endswith(".json"):
            _refuse_keys(folder / name)
    if CONFIG in names:
        refuse_quantised(folder / CONFIG, source or str(folder), dequantize=dequantize)
        architectures, kinds = architectures_shown(folder), kinds_of(folder)
        if architectures and all(kind.refused for kind in kinds):
            why = next((str(kind.refused) for kind in kinds), "is of no kind that ms-swift trains")
            raise VlmflowError(
                f"{folder / CONFIG}: the model is a {architectures}, which {why}", "choose another model"
            )
    if INDEX in names:
        read_weight_map(folder / INDEX, set(names), weights)
    pickles = [name for name in names if name.endswith(".bin.index.json")]
    if pickles and not {SINGLE, INDEX} & set(names):
        raise VlmflowError(
            f"{folder / pickles[0]}: the weights are pickles; {SINGLE} and {INDEX} are missing",
            "use a model in safetensors form, or convert it with transformers' save_pretrained",
        )


def architectures_shown(folder: Path) -> str:
    """Return the architectures that a model's config.json names, for people."""
    return ", ".join(map(shown, architectures_in(folder)))[:MOST_SHOWN]


def _refuse_keys(file: Path) -> None:
    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if why := _why_refused(key, value):
                text = json.dumps(value)
                more = "…" if len(text) > MOST_SHOWN else ""
                raise VlmflowError(f"{file}: {key} = {text[:MOST_SHOWN]}{more}: {why}", PLAIN_COPY)
        return dict(pairs)

    _read(file, look)


def _why_refused(key: str, value: Any) -> str | None:
    """Return what a key with this value does that is refused; None if it does no harm."""
    # Not a number of a token in a vocabulary, null or {}.
    if key in REFUSED_KEYS and value and type(value) is not int:
        return REFUSED_KEYS[key]
    # OWNER/NAME is one of the hub.
    if key in ("attn_implementation", "_attn_implementation") and "/" in json.dumps(value):
        return "names a kernel that transformers would run"
    # It would fill the reader's memory.
    if key == "num_labels" and type(value) is int and value > MOST_COUNTED:
        return "is for classifiers, and transformers would make a name for each class"
    return None


def read_weight_map(index: Path, names: Collection[str], weights: bool = True) -> dict[str, str]:
    """Return the map from tensor to file of an index of weights.

    names: the model's files. weights: whether the shards must be among them.

    Raises VlmflowError with the entry if it leads to anything but a safetensors file of the model.
    """
    content = _read(index, dict)
    weight_map: dict[str, str] | None = content.get("weight_map") if isinstance(content, dict) else None
    if not weight_map or not isinstance(weight_map, dict):
        raise VlmflowError(f"{index}: has no weight_map", "use a complete revision of the model")
    for tensor, shard in weight_map.items():
        entry = f"{index}: weight_map: {shown(tensor)[:MOST_SHOWN]} = {json.dumps(shard)[:MOST_SHOWN]}"
        outside = not isinstance(shard, str) or "/" in shard or "\\" in shard or ".." in shard
        if outside or (not shard.endswith(".safetensors") and shard in names):
            must = "in the model's own folder" if outside else "a safetensors file"
            raise VlmflowError(
                f"{entry}: a shard must be {must}",
                "use a revision that contains its own shards; do not use one that points to other files",
            )
        if shard not in names and weights:
            raise VlmflowError(f"{entry}, which is missing", "use a complete revision of the model")
    return weight_map


def _read(file: Path, look: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Parse a JSON file, passing every object's pairs to `look`; raises VlmflowError if it is invalid or too large."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise VlmflowError(f"{file}: {size:,} bytes of JSON; the limit is {MAX_JSON_BYTES:,}", PLAIN_COPY)
    try:
        return json.loads(file.read_bytes(), object_pairs_hook=look)
    except (ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: is not readable JSON: {error}", PLAIN_COPY) from None


def refuse_quantised(file: Path, source: str = "", *, dequantize: bool = False) -> dict[str, Any]:
    """Return the content of a model's config.json.

    source: the model's address, for the name of the unquantised one. dequantize: whether its weights become bfloat16
    (`models.NAME.dequantize`).

    Raises VlmflowError if it is no object, or of a quantised model; with `dequantize`, of one that is not in FP8.
    """
    config = _read_config(file)
    quantisation = _quantisation(file, config)
    if quantisation is None:
        if dequantize:
            raise VlmflowError(
                f"{file}: the base is not quantised, and models.NAME.dequantize is for bases in FP8",
                "remove the key dequantize of this model",
            )
        return config
    method = quantisation.get("quant_method", "no method given")
    if dequantize and method == METHOD:
        _block(file, quantisation)
        return config
    other = unquantised(source.removeprefix("hf://").partition("@")[0])
    plain = f"hf://{other}, the model that was quantised," if other else "the unquantised model"
    cause = f"{file}: the base is quantised ({str(method)[:100]})"
    use = f"use {plain} as the base of the run (models.NAME.source); tuner qlora quantises it for the training"
    if dequantize:
        raise VlmflowError(f"{cause}, and only FP8 ({METHOD}) can become bfloat16", use)
    if method == METHOD:
        use = f"set models.NAME.dequantize: true, which makes its weights bfloat16 once; or {use}"
    raise VlmflowError(f"{cause}, and the merge cannot add an update to quantised weights", use)


def block_of(file: Path) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, of a model that is quantised in FP8; None: the whole matrix.

    file: its config.json, which `refuse_quantised` accepted.
    """
    quantisation = _quantisation(file, _read_config(file))
    assert quantisation is not None, "refuse_quantised takes no other model"
    return _block(file, quantisation)


def without_quantisation(file: Path) -> dict[str, Any]:
    """Return the content of a model's config.json without what it says of quantised weights."""
    config = {key: value for key, value in _read_config(file).items() if key != KEY}
    if config.get(TEXT):
        config[TEXT] = {key: value for key, value in config[TEXT].items() if key != KEY}
    return config


def _read_config(file: Path) -> dict[str, Any]:
    config = read_object(file)
    if not isinstance(config.get(TEXT) or {}, dict):
        raise VlmflowError(f"{file}: {TEXT} = {config[TEXT]!r:.100} is not a JSON object", PUBLISHED)
    return config


def _quantisation(file: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what describes the quantisation; None if the model is not quantised."""
    described = [part[KEY] for part in (config, config.get(TEXT) or {}) if part.get(KEY)]
    if not described:
        return None
    if described[0] != described[-1]:
        raise VlmflowError(f"{file}: {KEY} and {TEXT}.{KEY} differ", PUBLISHED)
    return described[0] if isinstance(described[0], dict) else {"quant_method": described[0]}


def _block(file: Path, quantisation: dict[str, Any]) -> tuple[int, int] | None:
    block = quantisation.get("weight_block_size", BLOCK)
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise VlmflowError(f"{file}: {KEY}.weight_block_size = {block!r:.100} is not two numbers above 0", PUBLISHED)
    return block[0], block[1]


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file with one object; raises VlmflowError as `read_json`, and for other values."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise VlmflowError(f"{file}: {value!r:.100} is not a JSON object", PUBLISHED)
    return value


def read_template(file: Path) -> str:
    """Return the text of a file in UTF-8; raises VlmflowError if it is none, or too large."""
    size = file.stat().st_size
    if size > MOST_TEXT_BYTES:
        raise VlmflowError(f"{file}: has {size:,} bytes; a chat template has at most {MOST_TEXT_BYTES:,}", PUBLISHED)
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise VlmflowError(f"{file}: is not in UTF-8: {error}", PUBLISHED) from None


def utf8(text: str, file: Path) -> bytes:
    """Return a text in UTF-8. file: where it was read; raises VlmflowError if it holds what no UTF-8 has."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise VlmflowError(f"{file}: holds a text that cannot be in UTF-8: {error}", PUBLISHED) from None
