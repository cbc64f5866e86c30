"""Which layers of a model with experts get an adapter; all others are adapted as `train.lora.target_modules` says.

Since transformers 5 the experts of a layer are parameters with a matrix for each, no layers of their own. peft 0.20
takes names that their layers had before (gate_proj) for these parameters, also where dense layers or shared experts
have them (utils/transformers_weight_conversion.py): with `experts: false` the experts would be adapted, the layers
never. So such layers are named by their weights beside the experts, and not at all without.
"""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.model_types import kinds_of
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import LORA, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.model_files import CONFIG
from vlmflow.swift.arguments import Targets
from vlmflow.swift.child_process import quick_imports

ALL_LINEAR = "all-linear"

KEY = "runs.NAME.train.lora"


class _Layers(msgspec.Struct, frozen=True):
    """A model's layers by their names in memory.

    parameters: all. experts: those of experts. linear: the linear layers without the output head. taken: of all names
    that were asked for, those that peft takes for experts.
    """

    parameters: list[str]
    experts: list[str]
    linear: list[str]
    taken: list[str]


def adapter_targets(folder: Path, train: TrainSettings, tuner: Tuner) -> Targets | None:
    """Return what gets an adapter in a model with experts; None if that is what the settings say.

    folder: the model's files; weights are not needed.

    Raises VlmflowError with the key if the settings ask for experts that the model does not have, for layers that peft
    would take for experts, or for a quantisation of experts.
    """
    lora = train.lora
    if not tuner.trains_adapter or not (lora.experts or _names_experts(folder)):
        return None
    layers = _layers(folder, lora.target_modules)
    if layers is None:
        if lora.experts:
            raise _refusal(folder, "transformers cannot build the model, so its experts are not known")
        return None
    kinds = kinds_of(folder)

    def trained(name: str) -> bool:
        return not any(kind.part_of(name) in train.freeze for kind in kinds)

    experts = list(filter(trained, layers.experts))
    if layers.experts and tuner.quantises:
        raise VlmflowError(
            f"{folder / CONFIG}: the model has experts ({layers.experts[0]}, …), which tuner {tuner.name} cannot "
            "quantise",
            f"set runs.NAME.tuner: {LORA.name}",
        )
    if lora.experts and not experts:
        raise _refusal(folder, "the model has no experts" + (" that are not frozen" if layers.experts else ""))
    named = [name for name in lora.target_modules if _last(name) in layers.taken]
    if named:
        raise VlmflowError(
            f"{KEY}.target_modules: {named[0]}: in this model peft takes the name for its experts",
            f"remove it; with {ALL_LINEAR} and {KEY}.experts: true, experts and layers of this name are adapted",
        )
    shared = [name for name in layers.linear if _last(name) in layers.taken and trained(name)]
    all_linear = ALL_LINEAR in lora.target_modules
    if not (lora.experts or (all_linear and shared)):
        return None
    modules, parameters = lora.target_modules, _short(experts, layers.parameters)
    if all_linear and shared:
        others = [name for name in layers.linear if name not in shared and trained(name)]
        modules = [*_short(others, layers.linear), *(name for name in modules if name != ALL_LINEAR)]
        parameters += _short([f"{name}.weight" for name in shared], layers.parameters)
    return Targets(modules, parameters if lora.experts else [])


def _names_experts(folder: Path) -> bool:
    """Return whether a key of config.json speaks of experts; no other model needs to be built."""
    config = read_json(folder / CONFIG)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))] if isinstance(config, dict) else []
    return any("expert" in key for part in parts for key in part)


def _layers(folder: Path, targets: Collection[str]) -> _Layers | None:
    """Return a model's layers; None if it is quantised, or transformers cannot build it."""
    with quick_imports():
        import peft  # noqa: F401  # they take seconds; the child finds them loaded

        from vlmflow.swift.child_process import limited
        from vlmflow.swift.meta_model import meta_model  # noqa: F401
    layers = limited(partial(_look, folder, targets))
    return msgspec.convert(layers, _Layers) if "experts" in layers else None


def _look(folder: Path, targets: Collection[str]) -> dict[str, Any]:
    from torch.nn import Linear

    from vlmflow.swift.meta_model import experts_of, meta_model

    model = meta_model(folder)
    if model is None:
        return {}
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, Linear) and layer is not head]
    names = {_last(name) for name in [*linear, *targets]} - {ALL_LINEAR}
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "experts": list(experts_of(model)),
        "linear": linear,
        "taken": [name for name in sorted(names) if _is_taken(model, name)],
    }


def _is_taken(model: Any, name: str) -> bool:
    """Return whether peft takes a layer's name for a parameter of experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, conversions=None)
    except ValueError:  # it is one of two names that must be given together
        return True
    return name not in (config.target_modules or ())


def _short(wanted: Collection[str], every: Collection[str]) -> list[str]:
    """Return the ends of names behind their last number; a whole name where its end is that of another, too."""
    others = set(every) - set(wanted)
    ends = {name: re.sub(r".*\.\d+\.", "", name) for name in wanted}
    meant = {end: not any(f".{other}".endswith(f".{end}") for other in others) for end in ends.values()}
    return list(dict.fromkeys(end if meant[end] else name for name, end in ends.items()))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _refusal(folder: Path, why: str) -> VlmflowError:
    return VlmflowError(f"{KEY}.experts: true, but {why} ({folder / CONFIG})", f"remove {KEY}.experts")
