"""The files that a training releases: the adapter of a checkpoint, or the model's own weights with what proves them."""

import json
import os
import re
import shutil
from pathlib import Path

import msgspec

from vlmflow.config.run_settings import LoraSettings
from vlmflow.config.tuners import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LORA, MODEL_INDEX, MODEL_WEIGHTS, Tuner, tuner_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.core.integrity import refuse_changed
from vlmflow.in_trainer.messages import LOGITS, TRAINED
from vlmflow.supervisor.accounts import TrainingReport

SHARD = re.compile(r"model-[0-9]{1,9}-of-[0-9]{1,9}\.safetensors")


def kinds_of(tuner: Tuner) -> list[str]:
    """Return the files that each checkpoint has, as patterns of which each matches at least one file."""
    if tuner.trains_adapter:
        return [ADAPTER_WEIGHTS, ADAPTER_CONFIG]
    return ["model*.safetensors", TRAINED, LOGITS]


def released_files(folder: Path, tuner: Tuner) -> list[str]:
    """Return the names of the files that a checkpoint releases, sorted; its weights can be opened.

    Raises OSError, ValueError or SafetensorError if one is missing or damaged.
    """
    if tuner.trains_adapter:
        weights, described = [ADAPTER_WEIGHTS], [ADAPTER_CONFIG]
    elif (folder / MODEL_INDEX).exists():
        weights = _shards(folder / MODEL_INDEX)
        described = [MODEL_INDEX, TRAINED]
    else:
        weights, described = [MODEL_WEIGHTS], [TRAINED]
    if not tuner.trains_adapter:
        weights = [*weights, LOGITS]
    for name in described:
        json.loads((folder / name).read_bytes())
    for name in weights:
        _open_every_tensor(folder / name)
    return sorted([*weights, *described])


class _AdapterConfig(msgspec.Struct):
    """The used fields of `adapter_config.json` (peft's `LoraConfig`)."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False


def refuse_other_adapter(checkpoint: Path, lora: LoraSettings) -> None:
    """Raise VlmflowError with file, key and values if a checkpoint's adapter is not of the settings.

    The merge scales the adapter by this file.
    """
    file = checkpoint / ADAPTER_CONFIG
    found = read_account(file, _AdapterConfig)
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "use_dora": lora.dora}
    for key, expected in settings.items():
        if (value := getattr(found, key)) != expected:
            raise VlmflowError(
                f"{file}: {key} is {value}, but the run trained with {expected}",
                "something changed the file after the training: restore it, or remove the folder "
                f"{checkpoint.parent.parent} and run the same command again, which trains from the first step",
            )


def release(folder: Path, target: Path, tuner: Tuner = LORA) -> None:
    """Put a checkpoint's released files into the folder `target`.

    An adapter is copied, readable by others (transformers writes weights with mode 0600). A model's weights are linked:
    they may have a hundred GB, and nothing changes a checkpoint's files. On another disk they are copied.
    """
    for name in released_files(folder, tuner):
        if tuner.trains_adapter:
            shutil.copyfile(folder / name, target / name)
        else:
            _link_readable(folder / name, target / name)


def digests_of(folder: Path, tuner: Tuner = LORA) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's released files, by name."""
    return {name: sha256_of(folder / name) for name in released_files(folder, tuner)}


def read_release(full: Path) -> TrainingReport:
    """Return the report in `checkpoints/RUN/full`, after checking that the released files are still the same.

    Raises VlmflowError with the names of files that have changed since the training.
    """
    report = read_account(full / "report.json", TrainingReport)
    refuse_changed(
        "adapter files" if tuner_of(report.tuner).trains_adapter else "trained weights",
        full,
        report.digests.released,
        f"adapters/{full.parent.name}",
        f"remove {full} and run the same command again: it is copied from its run folder",
    )
    return report


class _Index(msgspec.Struct):
    """The used field of transformers' index of shards."""

    weight_map: dict[str, str]


def _shards(index: Path) -> list[str]:
    names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    if other := [name for name in names if not SHARD.fullmatch(name)]:
        raise ValueError(f"{index}: {other[0]!r} is not the name of a shard")
    return sorted(names)


def _open_every_tensor(file: Path) -> None:
    """Raise an error if the file lacks a part of a tensor in its header."""
    from safetensors import safe_open  # the environment `data` is without it, and asks for runs alone

    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            tensors.get_slice(name)


def _link_readable(source: Path, target: Path) -> None:
    source.chmod(0o644)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
